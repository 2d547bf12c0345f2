"""What a gate says, whatever it ran: one case per thing that was asked, each with a status of its own."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_NOT_JUDGED, EXIT_OK

GATE_SCHEMA_VERSION = 1
NOTHING = "nothing was compared"


class Status(str, enum.Enum):
    """What became of one case.

    `ERROR`: the program that was asked failed, or its answer decides nothing. `INFRA`: the machine did, and again when
    it was asked once more. `FLAKE`: judged and passed, after the machine had failed at it before.
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
    """One thing that was asked of one program.

    `rule` is what a failure is about (a knob, or what kind of check it was); `file` and `line` where a person mends it,
    relative to the repository, "" and 0 where no file does; `details` the long form of `message`.
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
    """All cases of a run. `notes` say what was looked at and why; `started` is UTC in ISO 8601."""

    schema_version: int = GATE_SCHEMA_VERSION
    title: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    started: str = ""
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_NOT_JUDGED


def exit_code_of_cases(cases: tuple[Case, ...]) -> int:
    """0 when every case that had to be judged passed and at least one was, 3 when one could not be judged, else 1."""
    statuses = {case.status for case in cases}
    if statuses.isdisjoint(JUDGED) or not statuses.isdisjoint(UNJUDGED):
        return EXIT_NOT_JUDGED
    return EXIT_MISMATCH if Status.FAILED in statuses else EXIT_OK


def with_nothing_said(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases; where none was judged and none says why not, one more that fails for that."""
    if any(case.status in (*JUDGED, *UNJUDGED) for case in cases):
        return cases
    return (*cases, Case(group="gate", name=NOTHING, status=Status.ERROR, message=NOTHING, rule="nothing-compared"))


def counts(cases: tuple[Case, ...]) -> dict[Status, int]:
    """How many cases have each status, those without any left out."""
    found = Counter(case.status for case in cases)
    return {status: found[status] for status in Status if found[status]}
