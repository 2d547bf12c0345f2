"""The name a checkpoint is loaded by, and what its tokenizer makes of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def snapshot_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json as it lies beside the weights."""
    loaded: dict[str, Any] = json.loads((Path(checkpoint.path) / "config.json").read_text())
    return loaded
