"""Build the prompts of a run, as token ids, and read the special tokens of its checkpoint.

Built prompts are seeded draws from the whole vocabulary, without special tokens, after the checkpoint's
beginning-of-sequence token. They are not text of any language, and include tokens that text never contains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from parity_audit.core.types import Checkpoint
from parity_audit.logprobs.causes import SpecialTokens

BUILT = 8
LENGTHS = (4, 48)
"""The shortest and the longest built prompt, in drawn tokens: short enough to be cheap, and different, so batches are ragged."""

CACHED_LENGTHS = (4, 288)
"""The same for runs with a prefix cache: the longest fills two blocks of 128 tokens, the size on a CPU and the largest in use."""

Prompts = tuple[tuple[int, ...], ...]


def built(
    config: dict[str, Any], special: SpecialTokens, *, seed: int, count: int = BUILT, cached: bool = False
) -> Prompts:
    """Return seeded prompts of different lengths, each starting with the beginning-of-sequence token if there is one.

    With `cached` some prompts are long enough to fill a block of an engine's prefix cache.
    """
    rng = np.random.default_rng(seed)
    start = () if special.bos is None else (special.bos,)
    barred = {special.bos, special.pad, *special.eos}
    ordinary = np.array([token for token in range(int(config["vocab_size"])) if token not in barred])
    lengths = np.linspace(*(CACHED_LENGTHS if cached else LENGTHS), count).astype(int)
    return tuple((*start, *rng.choice(ordinary, length).tolist()) for length in lengths)


def special_tokens(checkpoint: Checkpoint, config: dict[str, Any]) -> SpecialTokens:
    """Return the special token ids from generation_config.json, else from config.json."""
    own = {**config, **_json(Path(checkpoint.path) / "generation_config.json")}
    eos = own.get("eos_token_id")
    ends = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    return SpecialTokens(bos=own.get("bos_token_id"), eos=ends, pad=own.get("pad_token_id"))


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sampling settings that an engine takes from generation_config.json if a request gives none."""
    content = _json(Path(checkpoint.path) / "generation_config.json")
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {key: content[key] for key in keys if content.get(key) is not None}


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content
