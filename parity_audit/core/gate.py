"""The result of a gate, whatever it ran: one case per check, each with its own status."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK

GATE_SCHEMA_VERSION = 1
NOTHING = "nothing was compared"


class Status(str, enum.Enum):
    """The outcome of one case.

    `ERROR`: the tested program failed, or its answer decides nothing. `INFRA`: the machine failed, and failed again
    when the case was repeated. `FLAKE`: judged and passed, after the machine had failed on it before.
    """

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    INFRA = "infra"
    FLAKE = "flake"
    NOT_TESTED = "not tested"


JUDGED = (Status.PASSED, Status.FAILED, Status.FLAKE)
UNJUDGED = (Status.ERROR, Status.INFRA)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One check of one program.

    `rule` is what a failure is about: a knob, or the kind of the check. `file` and `line` are where a person can repair
    it, relative to the repository, "" and 0 if it is in no file. `details` is the long form of `message`.
    """

    group: str
    name: str
    status: Status
    message: str = ""
    details: str = ""
    rule: str = ""
    file: str = ""
    line: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GateReport:
    """All cases of a run. `notes` say what was checked and why; `started` is UTC in ISO 8601."""

    schema_version: int = GATE_SCHEMA_VERSION
    title: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_NOT_JUDGED


def exit_code_of_cases(cases: tuple[Case, ...]) -> int:
    """Return 3 if no case was judged or one could not be judged, 1 if a case failed, else 0."""
    statuses = {case.status for case in cases}
    if statuses.isdisjoint(JUDGED) or not statuses.isdisjoint(UNJUDGED):
        return EXIT_NOT_JUDGED
    return EXIT_MISMATCH if Status.FAILED in statuses else EXIT_OK


def with_error_if_nothing_compared(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Return the cases, with one error case added if none of them was judged and none says why."""
    if any(case.status in (*JUDGED, *UNJUDGED) for case in cases):
        return cases
    return (*cases, Case(group="gate", name=NOTHING, status=Status.ERROR, message=NOTHING, rule="nothing-compared"))


def counts(cases: tuple[Case, ...]) -> dict[Status, int]:
    """Return how many cases have each status; a status without cases is left out."""
    found = Counter(case.status for case in cases)
    return {status: found[status] for status in Status if found[status]}
