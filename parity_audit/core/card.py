"""The card of one cell of the matrix: the answer to one question about one candidate on one model."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.report import LogitsDelta, Side, Verdict
from parity_audit.core.types import KnobValue, NotTested

CARD_VERSION = 1


class Question(str, enum.Enum):
    """The question: does it compute the same function, does it return the same log-probabilities, does it depend on
    its batch?"""

    AUDIT = "audit"
    LOGPROBS = "logprobs"
    INVARIANCE = "invariance"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question of a cell and its conditions; two cards with equal `Asked` answer the same question.

    `candidate` and `reference` are BACKEND strings (for log-probabilities, the engine and the trainer). `synthetic` is
    None for real weights. `probes` is empty for all probes. `options` are the other words of the command. `program` is
    the release of parity-audit that judged.
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
    """A finding in short form; the evidence is in the report. `message` says what two values alone cannot express,
    else it is empty."""

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
    """Verdict, agreement and detection limits of one (model, backend, version), and the conditions under which they
    hold.

    `package` and `version` are what really ran. `weights` has the source and the fingerprint of the revision. `command`
    produces the card again. `date` is UTC in ISO 8601. `agreement` is None if nothing could be compared. `patched` is
    the verdict with the patches of the audit. `error` has the code and message of a cell that failed.
    `detection_limits` has, for each constant, the smallest error that the audit was sure to detect. `said` is the
    verdict in the question's own word if it has one (`class-only`). `figures` are the numbers of a question other than
    an audit.
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
