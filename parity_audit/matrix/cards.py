"""Write cards to disk and read them back; each file is written completely or not at all, and malformed ones are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from datetime import datetime
from pathlib import Path

from parity_audit.core.card import CARD_VERSION, Asked, Card, Question
from parity_audit.core.errors import CannotRun, NotJudged, refusals_of_the_disk
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.report import Verdict
from parity_audit.core.whole_file import write_whole

CARDS = Path("reports/cards")
SETTLED = (CannotRun.default_code, "name-not-in-release")
"""Codes of errors that the same release gives again: it does not run the architecture, or does not know the model's name."""
JUDGED = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH)


def card_path(folder: Path, asked: Asked) -> Path:
    """Return the file of a question's card: a readable name and a hash of the whole question.

    The release of parity-audit is not hashed, so that a new release overwrites the card.
    """
    question = dumps(dataclasses.replace(asked, program=""))
    kind = "" if asked.question is Question.AUDIT else f"--{asked.question.value}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{asked.model.rpartition('/')[2]}--{asked.candidate}{kind}")
    return folder / f"{name}-{hashlib.sha256(question.encode()).hexdigest()[:8]}.json"


def write_card(card: Card, folder: Path) -> Path:
    """Write a card to the file of its question, completely or not at all, and return the path.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    path = card_path(folder, card.asked)
    with refusals_of_the_disk("write the card", path):
        write_whole(path, dumps(card, indent=1) + "\n")
    return path


def read_card(path: Path) -> Card:
    """Read a card and check it against its schema; a judged verdict must have figures and the weights' fingerprint.

    Raises:
        NotJudged: the file is not a card, or its verdict lacks the figures or the fingerprint.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or value.get("schema_version") != CARD_VERSION:
            raise ValueError(f"schema_version is not {CARD_VERSION}")
        card = from_plain(Card, value)
        datetime.fromisoformat(card.date)
    except (OSError, ValueError, TypeError) as error:
        raise _broken(path, str(error)) from error
    has_figures = card.agreement is not None if card.asked.question is Question.AUDIT else bool(card.figures)
    if card.verdict in JUDGED and not (has_figures and card.weights.get("fingerprint")):
        raise _broken(path, f"a verdict of {card.verdict.value} without an agreement figure or a fingerprint")
    return card


def read_cards(folder: Path) -> list[Card]:
    """Return every card of a folder, ordered by question, model, candidate, dtype and options."""
    cards = [read_card(path) for path in sorted(folder.glob("*.json"))]
    return sorted(cards, key=_place)


def _place(card: Card) -> tuple[str, ...]:
    asked = card.asked
    return asked.question.value, asked.model.lower(), asked.candidate, asked.dtype, *asked.options


def current_card(folder: Path, asked: Asked) -> Card | None:
    """Return the card of this question if this release of parity-audit wrote it, else None.

    A card with an error that a repeated run may avoid (see `SETTLED`) counts as missing, so that the cell is run again.
    """
    path = card_path(folder, asked)
    card = read_card(path) if path.is_file() else None
    if card is None or card.asked != asked:
        return None
    return card if card.error is None or card.error.get("code") in SETTLED else None


def _broken(path: Path, why: str) -> NotJudged:
    return NotJudged(
        f"not a card: {why}", code="bad-card", where=str(path), hint="delete it and run its cell again"
    )  # fmt: skip
