"""Decode the worst tokens of a candidate to text, with the checkpoint's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parity_audit.core.report import Candidate, TokenLogits
from parity_audit.core.types import Checkpoint

TOKENIZER = "tokenizer.json"
"""The only tokenizer file that is used, because it can be read without importing transformers, which takes seconds."""


def with_text(candidate: Candidate, checkpoint: Checkpoint) -> Candidate:
    """Return the candidate with its worst tokens as text; unchanged if the checkpoint has no `TOKENIZER` file."""
    decode = _decoder(Path(checkpoint.path) / TOKENIZER) if candidate.worst_tokens else None
    if decode is None:
        return candidate
    return replace(candidate, worst_tokens=tuple(_told(one, decode) for one in candidate.worst_tokens))


def _told(one: TokenLogits, decode: Callable[[int], str]) -> TokenLogits:
    return replace(
        one, text=decode(one.token_id), reference_text=decode(one.reference_id), candidate_text=decode(one.candidate_id)
    )  # fmt: skip


def _decoder(path: Path) -> Callable[[int], str] | None:
    """Return a function from token id to text, which shows special tokens by name; None if the file cannot be read."""
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library is missing, or raises a bare Exception for a file that is not a tokenizer
        return None
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
