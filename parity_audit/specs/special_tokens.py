"""Special token ids: those that the config names, and those that the tokenizer marks as special."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def special_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every special id of a checkpoint in ascending order. A tokenizer file that is missing or no JSON adds none."""
    named = [value for key, value in config.items() if key.endswith("_token_id")]
    flat = [item for value in named for item in (value if isinstance(value, list) else [value])]
    return tuple(sorted({item for item in [*flat, *_of_tokenizer(folder)] if type(item) is int}))


def _of_tokenizer(folder: Path) -> list[Any]:
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    added = content.get("added_tokens") if isinstance(content, dict) else None
    tokens = added if isinstance(added, list) else []
    return [token.get("id") for token in tokens if isinstance(token, dict) and token.get("special")]
