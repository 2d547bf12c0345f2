"""What the machine failed at is asked again; what was judged never is, so that no number gets a second chance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from parity_audit.core.errors import ParityError
from parity_audit.core.gate import JUDGED, Case, Status
from parity_audit.report.cases import status_of_error

WHOLE = "audit"
"""The name of the case of a run that ended before any backend was judged."""


def asked(ask: Callable[[], Iterable[Case]], *, group: str, retries: int) -> list[Case]:
    """The cases of a run; those that the machine failed at are taken from the next run, up to `retries` times.

    A case that passes then is a flake. An error that ends a run is one case, of status infra or error by its code.
    """
    cases = _timed(ask, group)
    for _ in range(retries):
        lost = [case for case in cases if case.status is Status.INFRA]
        if not lost:
            break
        again = _timed(ask, group)
        kept = [case for case in cases if case.status is not Status.INFRA]
        cases = [*kept, *(new for old in lost for new in _replacing(old, again, kept))]
    return cases


def _replacing(old: Case, again: Sequence[Case], kept: Sequence[Case]) -> list[Case]:
    """What a later run says of a case that the machine failed at: itself again where it says nothing."""
    judged = {(case.group, subject(case)) for case in kept}
    same = [
        case for case in again
        if case.group == old.group and subject(case) in (old.name, subject(case) if old.name == WHOLE else "")
        and (case.group, subject(case)) not in judged
    ]  # fmt: skip
    return [_flake(case, old) for case in same] or [old]


def subject(case: Case) -> str:
    """The backend or check that a case is about; the cases of one that fails name what is wrong after a colon."""
    return case.name.partition(": ")[0]


def _flake(case: Case, old: Case) -> Case:
    if case.status is not Status.PASSED:
        return case
    return replace(case, status=Status.FLAKE, message=f"{case.message}; the first try ended with: {old.message}")


def _timed(ask: Callable[[], Iterable[Case]], group: str) -> list[Case]:
    """The cases of one run; its seconds are shared out evenly among those that were judged."""
    started = time.perf_counter()
    try:
        cases = list(ask())
    except ParityError as error:
        details = "\n".join(error.lines()[1:])
        cases = [
            Case(
                group=group, name=WHOLE, status=status_of_error(error.code), message=error.message, details=details,
                rule=error.code,
            )
        ]  # fmt: skip
    judged = sum(case.status in JUDGED for case in cases) or 1
    each = (time.perf_counter() - started) / judged
    return [replace(case, seconds=each if case.status in JUDGED else 0.0) for case in cases]
