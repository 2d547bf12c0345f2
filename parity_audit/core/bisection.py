"""What a bisection over releases found, as bisect.json carries it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BISECTION_SCHEMA_VERSION = 1
UNEXPLAINED = "unexplained"
"""The fault of a release that mismatches without a finding."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One release, really run: its `faults` by knob with the value that it shows; or `skipped`, why nothing is known of it."""

    version: str
    date: str
    faults: dict[str, str] = field(default_factory=dict)
    verdict: str = ""
    skipped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """The release at which a fault appears (`broke`) or disappears (`repaired`).

    `before` is the last judged release on the other side; `unknown` are releases between the two of which nothing is
    known, so that the change may be in one of them already. `value` is the faulty value; `otherwise` what the release on the good
    side shows instead, where that is wrong as well.
    """

    fault: str
    kind: str
    release: str
    date: str
    before: str
    value: str
    unknown: tuple[str, ...] = ()
    otherwise: str = ""


@dataclass(frozen=True, kw_only=True)
class BisectReport:
    """The whole answer. `order` says what the releases were ordered by; `probes` what each was run on, all when empty."""

    schema_version: int = BISECTION_SCHEMA_VERSION
    model: str
    backend: str
    reference: str
    good: str
    bad: str
    order: str
    probes: tuple[str, ...]
    changes: tuple[Change, ...]
    observations: tuple[Observation, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    exit_code: int = 3
