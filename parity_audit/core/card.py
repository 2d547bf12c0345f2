"""The card of one cell of the matrix: one question about one candidate on one model, as it was answered."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.report import LogitsDelta, Side, Verdict
from parity_audit.core.types import KnobValue, NotTested

CARD_VERSION = 1


class Question(str, enum.Enum):
    """What was asked: does it compute the same function, does it return the same log-probabilities, does it depend on its batch?"""

    AUDIT = "audit"
    LOGPROBS = "logprobs"
    INVARIANCE = "invariance"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question of a cell, as it was asked; two cards with the same question answer it twice.

    `candidate` and `reference` are BACKEND strings (the engine and the trainer of log-probabilities), `synthetic` is None for
    real weights, `probes` empty for all of them, `options` the further words of its command, `program` the release of
    parity-audit that judged.
    """

    question: Question = Question.AUDIT
    model: str
    candidate: str
    reference: str
    synthetic: str | None
    seed: int
    dtype: str
    device: str
    probes: tuple[str, ...]
    repair: bool
    options: tuple[str, ...] = ()
    program: str


@dataclass(frozen=True, kw_only=True)
class CardFinding:
    """What was wrong, in short; the evidence is in the report. `message` says what two values cannot, else it is empty."""

    knob: str
    kind: str
    layers: tuple[int, ...] | None
    reference_value: KnobValue
    candidate_value: KnobValue
    spec_value: KnobValue
    departs_from_spec: str
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Verdict, agreement and detection limits of one (model, backend, version), and what they hold for.

    `package` and `version` are what really ran, `weights` name the source and the fingerprint of the revision,
    `command` makes the card again, `date` is UTC in ISO 8601. `agreement` is None where nothing could be compared,
    `patched` the verdict with the patches of the audit, `error` the code and message of a cell that broke off.
    `detection_limits` are the smallest errors of each constant that the audit was sure to see. `said` is the verdict in the
    question's own word where it has one (`class-only`); `figures` are the numbers of a question that is no audit.
    """

    schema_version: int = CARD_VERSION
    asked: Asked
    command: str
    date: str
    architecture: str
    weights: dict[str, Any]
    reference: Side | None
    package: str
    version: str
    settings: dict[str, Any]
    probes: tuple[dict[str, Any], ...]
    verdict: Verdict
    said: str = ""
    why: str
    agreement: LogitsDelta | None = None
    figures: dict[str, float] = field(default_factory=dict)
    worst_site: str = ""
    worst_ratio: float | None = None
    findings: tuple[CardFinding, ...] = ()
    patched: Verdict | None = None
    detection_limits: dict[str, float] = field(default_factory=dict)
    not_tested: tuple[NotTested, ...] = ()
    error: dict[str, str] | None = None
