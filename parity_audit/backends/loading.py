"""The name a checkpoint is loaded by, and what its tokenizer makes of a text."""

from __future__ import annotations

from pathlib import Path

from parity_audit.core.types import Checkpoint


def load_name(checkpoint: Checkpoint) -> str:
    """The hub id where the weights lie in a hub cache (ours or the user's), else the directory."""
    in_cache = checkpoint.hf_home is not None or Path(checkpoint.path).parent.name == "snapshots"
    return checkpoint.repo_id if in_cache else checkpoint.path


def tokenization(checkpoint: Checkpoint, texts: tuple[str, ...]) -> dict[str, list[int]]:
    """Token ids of each text by the checkpoint's own tokenizer; empty when it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(load_name(checkpoint))
    except (OSError, ValueError):
        return {}
    return {text: list(tokenizer(text)["input_ids"]) for text in texts}
