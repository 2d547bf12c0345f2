"""Cards on disk: written whole, read back field by field, and never believed when malformed."""

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
"""Errors that the same release will give again: it does not run the architecture, or does not know the model's name."""
JUDGED = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH)


def card_path(folder: Path, asked: Asked) -> Path:
    """One file for each question, whatever release of parity-audit answers it: a readable name and a hash of the rest."""
    question = dumps(dataclasses.replace(asked, program=""))
    kind = "" if asked.question is Question.AUDIT else f"--{asked.question.value}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{asked.model.rpartition('/')[2]}--{asked.candidate}{kind}")
    return folder / f"{name}-{hashlib.sha256(question.encode()).hexdigest()[:8]}.json"


def write_card(card: Card, folder: Path) -> Path:
    """Write the card of its question; the file is there whole or not at all.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    path = card_path(folder, card.asked)
    with refusals_of_the_disk("write the card", path):
        write_whole(path, dumps(card, indent=1) + "\n")
    return path


def read_card(path: Path) -> Card:
    """A card, held to its schema and to what its verdict needs.

    Raises:
        NotJudged: it is none, or it claims more than it holds.
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
    """Every card of a folder, by model, candidate and dtype."""
    cards = [read_card(path) for path in sorted(folder.glob("*.json"))]
    return sorted(cards, key=_place)


def _place(card: Card) -> tuple[str, ...]:
    asked = card.asked
    return asked.question.value, asked.model.lower(), asked.candidate, asked.dtype, *asked.options


def current_card(folder: Path, asked: Asked) -> Card | None:
    """The card that answers this question in this release of parity-audit; a cell that broke off is asked again."""
    path = card_path(folder, asked)
    card = read_card(path) if path.is_file() else None
    if card is None or card.asked != asked:
        return None
    return card if card.error is None or card.error.get("code") in SETTLED else None


def _broken(path: Path, why: str) -> NotJudged:
    return NotJudged(
        f"not a card: {why}", code="bad-card", where=str(path), hint="delete it and run its cell again"
    )  # fmt: skip
