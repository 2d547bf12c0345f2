"""The card of one cell of the matrix: one candidate against one reference, on one model, as one audit judged it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.report import LogitsDelta, Side, Verdict
from parity_audit.core.types import KnobValue, NotTested

CARD_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question of a cell, as it was asked; two cards with the same question answer it twice.

    `candidate` and `reference` are BACKEND strings, `synthetic` is None for real weights, `probes` empty for all of them,
    `program` the release of parity-audit that judged.
    """

    model: str
    candidate: str
    reference: str
    synthetic: str | None
    seed: int
    dtype: str
    device: str
    probes: tuple[str, ...]
    repair: bool
    program: str


@dataclass(frozen=True, kw_only=True)
class CardFinding:
    """What was wrong, in short; the evidence is in the report of the audit."""

    knob: str
    kind: str
    layers: tuple[int, ...] | None
    reference_value: KnobValue
    candidate_value: KnobValue
    spec_value: KnobValue
    departs_from_spec: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """Verdict, agreement and detection limits of one (model, backend, version), and what they hold for.

    `package` and `version` are what really ran, `weights` name the source and the fingerprint of the revision,
    `command` makes the card again, `date` is UTC in ISO 8601. `agreement` is None where nothing could be compared,
    `patched` the verdict with the patches of the audit, `error` the code and message of a cell that broke off.
    `detection_limits` are the smallest errors of each constant that the audit was sure to see.
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
    why: str
    agreement: LogitsDelta | None = None
    worst_site: str = ""
    worst_ratio: float | None = None
    findings: tuple[CardFinding, ...] = ()
    patched: Verdict | None = None
    detection_limits: dict[str, float] = field(default_factory=dict)
    not_tested: tuple[NotTested, ...] = ()
    error: dict[str, str] | None = None
