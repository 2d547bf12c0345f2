"""The name a checkpoint is loaded by, and what its tokenizer makes of a text."""

from __future__ import annotations

from parity_audit.core.types import Checkpoint


def load_name(checkpoint: Checkpoint) -> str:
    """The hub id where a hub cache gives these very weights for it (ours or the user's), else the directory."""
    return checkpoint.repo_id if checkpoint.by_name else checkpoint.path


def tokenization(checkpoint: Checkpoint, texts: tuple[str, ...]) -> dict[str, list[int]]:
    """Token ids of each text by the checkpoint's own tokenizer; empty when it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(load_name(checkpoint))
    except (OSError, ValueError):
        return {}
    return {text: list(tokenizer(text)["input_ids"]) for text in texts}
