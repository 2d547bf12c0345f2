"""Decode tokens to text: the worst tokens with the tokens before and after them, and the round trip of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from parity_audit.capture.prompts import tokenizer_of
from parity_audit.core.errors import UsageError
from parity_audit.core.logprob_report import LogprobReport, TokenRow
from parity_audit.core.rollouts import Completion
from parity_audit.core.types import Checkpoint

BEFORE, AFTER = 12, 4
"""The number of tokens shown before and after a token: enough to recognise the place, few enough for a table."""


def with_text(report: LogprobReport, completions: Sequence[Completion], checkpoint: Checkpoint) -> LogprobReport:
    """Return the report with its worst tokens as text in their context; unchanged if the checkpoint has no tokenizer."""
    tokenizer = _any_tokenizer(checkpoint)
    if tokenizer is None:
        return report
    return replace(report, worst=tuple(_told(row, completions[row.sequence], tokenizer) for row in report.worst))


def _told(row: TokenRow, completion: Completion, tokenizer: Any) -> TokenRow:
    ids = (*completion.prompt_ids, *completion.token_ids)
    place = len(completion.prompt_ids) + row.position
    parts = (ids[max(0, place - BEFORE) : place], ids[place : place + 1], ids[place + 1 : place + 1 + AFTER])
    before, text, after = (str(tokenizer.decode(part)) for part in parts)
    return replace(row, before=before, text=text, after=after)


def round_trip(checkpoint: Checkpoint) -> Callable[[tuple[int, ...]], tuple[int, ...]] | None:
    """Return a function that decodes token ids with the checkpoint's tokenizer and encodes the text again.

    Ids that give no tokens when encoded again are returned unchanged. Return None if the checkpoint has no tokenizer.
    """
    tokenizer = _any_tokenizer(checkpoint)
    if tokenizer is None:
        return None
    return lambda ids: tuple(tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]) or ids


def _any_tokenizer(checkpoint: Checkpoint) -> Any:
    if not checkpoint.has_tokenizer:
        return None
    try:
        return tokenizer_of(checkpoint)
    except UsageError:
        return None
