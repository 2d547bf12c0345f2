"""The tokens whose logits differ most, as an HTML table: position, token, distance, and each side's likeliest next token."""

from __future__ import annotations

import json
from collections.abc import Sequence

from parity_audit.core.report import Candidate, TokenLogits
from parity_audit.report.blocks import columns
from parity_audit.report.html import drawn
from parity_audit.report.numbers import number

TITLES = (
    "probe",
    "row",
    "position",
    "token",
    "largest difference",
    "at",
    "KL in nats",
    "reference's likeliest",
    "candidate's",
)
NUMBERS = (1, 2, 4, 5, 6)
SAME = "the same"


def token_panel(one: Candidate) -> str:
    """Return the panel; empty if no logit differs or no logits were compared."""
    if not one.worst_tokens:
        return ""
    changed = sum(token.reference_id != token.candidate_id for token in one.worst_tokens)
    said = f"{changed} of these {len(one.worst_tokens)} tokens have another likeliest successor in the candidate."
    table = drawn(columns(TITLES, _rows(one.worst_tokens), right=NUMBERS))
    return f'<h3>Tokens whose logits differ most</h3><p class="why">{said}</p>{table}'


def _rows(tokens: Sequence[TokenLogits]) -> list[tuple[str, ...]]:
    return [
        (
            one.probe, str(one.row), str(one.position), _named(one.token_id, one.text), number(one.max_abs), str(one.at_id),
            number(one.kl), _named(one.reference_id, one.reference_text),
            SAME if one.candidate_id == one.reference_id else _named(one.candidate_id, one.candidate_text),
        )
        for one in tokens
    ]  # fmt: skip


def _named(token: int, text: str) -> str:
    """Return the id and the quoted text of a token; line breaks and other controls are escaped."""
    return f"{token} {json.dumps(text, ensure_ascii=False)}" if text else str(token)
