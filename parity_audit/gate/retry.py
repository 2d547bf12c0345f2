"""Repeat cases that failed because of the machine. A case that was judged is never repeated, so that its result stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from parity_audit.core.errors import ParityError
from parity_audit.core.gate import JUDGED, Case, Status
from parity_audit.report.cases import status_of_error

WHOLE = "audit"
"""Name of the single case of a run that an error ended before any backend was judged."""


def run_with_retries(ask: Callable[[], Iterable[Case]], *, group: str, retries: int) -> list[Case]:
    """Run `ask` and return its cases; while some failed because of the machine, run it again, up to `retries` times.

    From a repeated run only the cases that replace failed ones are taken. Such a case counts as a flake if it passes. An error
    that ends a run is one case; its code decides the status (see `status_of_error`).

    Args:
        ask: runs the checks and returns their cases.
        group: group of the case of a run that ended with an error.
        retries: largest number of repeated runs.
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
    """Return the cases of a later run that replace a case which failed because of the machine.

    These are the cases about the same subject, or all cases of the group if the whole run had failed. Cases about subjects in
    `kept` are left out, because these were judged before. If no case is left, `old` itself is returned.
    """
    judged = {(case.group, subject(case)) for case in kept}
    same = [
        case for case in again
        if case.group == old.group and subject(case) in (old.name, subject(case) if old.name == WHOLE else "")
        and (case.group, subject(case)) not in judged
    ]  # fmt: skip
    return [_flake(case, old) for case in same] or [old]


def subject(case: Case) -> str:
    """Return the backend or check that a case is about: its name up to a colon, after which a failed case says what is wrong."""
    return case.name.partition(": ")[0]


def _flake(case: Case, old: Case) -> Case:
    if case.status is not Status.PASSED:
        return case
    return replace(case, status=Status.FLAKE, message=f"{case.message}; the first try ended with: {old.message}")


def _timed(ask: Callable[[], Iterable[Case]], group: str) -> list[Case]:
    """Return the cases of one run, with its seconds divided equally among the judged cases.

    A ParityError that ends the run becomes a single case.
    """
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
