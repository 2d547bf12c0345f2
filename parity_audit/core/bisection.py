"""The result of a bisection over releases, as bisect.json holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BISECTION_SCHEMA_VERSION = 1
UNEXPLAINED = "unexplained"
"""The fault of a release that mismatches without a finding."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The result of one release that was run: `faults` maps each wrong knob to the value that the release shows.
    `skipped` says why nothing is known of it, empty if it was judged."""

    version: str
    date: str
    faults: dict[str, str] = field(default_factory=dict)
    verdict: str = ""
    skipped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """The release at which a fault appears (`broke`) or disappears (`repaired`).

    `before` is the last judged release on the other side. `unknown` are the releases between the two that could not be
    judged, so that the change may be in one of them already. `value` is the faulty value. `otherwise` is the value that
    the release on the good side shows, if that is wrong as well.
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
    """The whole result. `order` says how the releases were ordered; `probes` are those that each release ran, empty
    for all of them."""

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
