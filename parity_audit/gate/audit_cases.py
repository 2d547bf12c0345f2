"""Turn the report of one run of a gate into cases, each placed at the line that asks for its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parity_audit.capture.workspace import slug
from parity_audit.core.gate import Case
from parity_audit.core.invariance_report import InvarianceReport
from parity_audit.core.logprob_report import LogprobReport
from parity_audit.core.progress import Progress
from parity_audit.core.report import Report
from parity_audit.gate.cells import Cell
from parity_audit.gate.retry import subject
from parity_audit.matrix.ask import ask
from parity_audit.report.cases import candidate_cases, cases_of
from parity_audit.report.words import labels


@dataclass(frozen=True, kw_only=True)
class CellGate:
    """A run of the gate and its options; the report is written below `out`."""

    cell: Cell
    install: bool
    out: Path
    progress: Progress


def audit_cases(gate: CellGate) -> list[Case]:
    """Run a cell and return the cases of every backend in it.

    Raises:
        ParityError: the reference does not run, or the question is malformed.
    """
    cell, places = gate.cell, dict(gate.cell.places)
    report = ask(cell.asked, out=gate.out / slug(cell.group), install=gate.install, progress=gate.progress)
    if not isinstance(report, Report):
        return [
            _placed(case, places, [asked.candidate for asked in cell.asked]) for case in _own_cases(report, cell.group)
        ]
    own = [
        _placed(case, places, [asked.candidate])
        for asked, name, one in zip(cell.asked, labels(report), report.candidates, strict=True)
        for case in candidate_cases(cell.group, name, one)
    ]
    named = {(case.name, case.message) for case in own}
    return [*own, *(case for case in cases_of(report) if (case.name, case.message) not in named)]


def _own_cases(report: LogprobReport | InvarianceReport, group: str) -> list[Case]:
    return [replace(case, group=group) for case in cases_of(report)]


def _placed(case: Case, places: Mapping[str, tuple[str, int]], candidates: Sequence[str]) -> Case:
    """Return the case with the file and line that ask for its backend; without them if that line is not known.

    Its backend is the only one of `candidates`, or the one that is the subject of the case (see `retry.subject`).
    """
    own = candidates if len(candidates) == 1 else [one for one in candidates if subject(case) == one]
    file, line = next((places[one] for one in own if one in places), ("", 0))
    return replace(case, file=file, line=line)
