"""Cards on disk: made of a finished report, written whole, read back field by field, and never believed when malformed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.card import CARD_VERSION, Asked, Card, CardFinding
from parity_audit.core.errors import CannotRun, NotJudged, ParityError
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.limits import share_of_limit
from parity_audit.core.report import Candidate, Finding, Report, Verdict

CARDS = Path("reports/cards")
SETTLED = (CannotRun.default_code, "name-not-in-release")
"""Errors that the same release will give again: it does not run the architecture, or does not know the model's name."""
JUDGED = (Verdict.EXACT, Verdict.PARITY, Verdict.MISMATCH)


def card_of(report: Report, candidate: Candidate, asked: Asked, command: str = "") -> Card:
    """What one candidate of a finished audit goes down in the table with."""
    worst = max(candidate.sites, key=share_of_limit, default=None)
    return Card(
        asked=asked, command=command or command_of(asked), date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        architecture=report.architecture, weights=report.weights, reference=report.reference,
        package=candidate.package, version=candidate.version, settings=candidate.settings, probes=report.probes,
        verdict=candidate.verdict, why=candidate.why, agreement=candidate.logits,
        worst_site=worst.site if worst else "", worst_ratio=None if worst is None else worst.noise_ratio,
        findings=tuple(_in_short(item) for item in candidate.findings),
        patched=candidate.patched.verdict if candidate.patched else None,
        detection_limits=candidate.detection_limits, not_tested=(*candidate.not_tested, *report.not_tested),
        error=_error(candidate.error),
    )  # fmt: skip


def cards_of(report: Report, given: Sequence[str] | None, question: Asked) -> list[Card]:
    """A card of each candidate of an audit; candidates that were not named are those releases that ran.

    Args:
        given: the BACKEND strings as they were asked for, in the order of the report; None for every one that runs.
        question: all of the question but its candidate.
    """
    ran = [f"{one.backend}=={one.version}" if one.version else one.backend for one in report.candidates]
    named = ran if given is None else [str(parse_backend(text)) for text in given]
    cells = [dataclasses.replace(question, model=report.model, candidate=name) for name in named]
    return [card_of(report, one, asked) for one, asked in zip(report.candidates, cells, strict=True)]


def failed_card(asked: Asked, error: ParityError) -> Card:
    """The card of a cell whose audit broke off before a candidate was judged."""
    return Card(
        asked=asked, command=command_of(asked), date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        architecture="", weights={}, reference=None, package="", version="", settings={}, probes=(),
        verdict=Verdict.ERROR, why=error.message, error=_error(error.to_json()),
    )  # fmt: skip


def command_of(asked: Asked) -> str:
    """The command that answers the question of one cell."""
    words = ["parity-audit", asked.model]
    words += {None: [], "mini": ["--miniature"]}.get(asked.synthetic, ["--synthetic", str(asked.synthetic)])
    words += ["-r", asked.reference] if asked.reference != "hf" else []
    words += ["-c", asked.candidate]
    words += [word for name in asked.probes for word in ("--probe", name)]
    words += ["--seed", str(asked.seed)] if asked.seed else []
    words += ["--dtype", asked.dtype] if asked.dtype != "float32" else []
    words += ["--device", asked.device] if asked.device != "cpu" else []
    return shlex.join([*words, *([] if asked.repair else ["--no-repair"])])


def card_path(folder: Path, asked: Asked) -> Path:
    """One file for each question, whatever release of parity-audit answers it: a readable name and a hash of the rest."""
    question = dumps(dataclasses.replace(asked, program=""))
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{asked.model.rpartition('/')[2]}--{asked.candidate}")
    return folder / f"{name}-{hashlib.sha256(question.encode()).hexdigest()[:8]}.json"


def write_card(card: Card, folder: Path) -> Path:
    """Write the card of its question; the file is there whole or not at all.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    path = card_path(folder, card.asked)
    part = path.with_name(f".{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(dumps(card, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise NotJudged(f"cannot write the card: {error.strerror or error}", code="disk", where=str(path)) from error
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
    if card.verdict in JUDGED and (card.agreement is None or not card.weights.get("fingerprint")):
        raise _broken(path, f"a verdict of {card.verdict.value} without an agreement figure or a fingerprint")
    return card


def read_cards(folder: Path) -> list[Card]:
    """Every card of a folder, by model, candidate and dtype."""
    cards = [read_card(path) for path in sorted(folder.glob("*.json"))]
    return sorted(cards, key=lambda card: (card.asked.model.lower(), card.asked.candidate, card.asked.dtype))


def current_card(folder: Path, asked: Asked) -> Card | None:
    """The card that answers this question in this release of parity-audit; a cell that broke off is asked again."""
    path = card_path(folder, asked)
    card = read_card(path) if path.is_file() else None
    if card is None or card.asked != asked:
        return None
    return card if card.error is None or card.error.get("code") in SETTLED else None


def _in_short(finding: Finding) -> CardFinding:
    return CardFinding(
        knob=finding.knob, kind=finding.kind, layers=finding.layers, reference_value=finding.reference_value,
        candidate_value=finding.candidate_value, spec_value=finding.spec_value,
        departs_from_spec=finding.departs_from_spec,
    )  # fmt: skip


def _error(error: dict[str, object] | None) -> dict[str, str] | None:
    """Code, message and hint; places on this machine are left out."""
    return None if error is None else {key: str(error.get(key, "")) for key in ("code", "message")}


def _broken(path: Path, why: str) -> NotJudged:
    return NotJudged(
        f"not a card: {why}", code="bad-card", where=str(path), hint="delete it and run its cell again"
    )  # fmt: skip
