"""One cell of a matrix as cases: an audit, each finding at the line that asked for the backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from parity_audit.api import audit
from parity_audit.capture.workspace import slug
from parity_audit.core.gate import Case
from parity_audit.core.progress import Progress
from parity_audit.gate.cells import Cell
from parity_audit.report.cases import candidate_cases, cases_of
from parity_audit.report.words import labels


@dataclass(frozen=True, kw_only=True)
class CellGate:
    """How a cell is audited; `out` is where its report goes."""

    cell: Cell
    seed: int
    install: bool
    out: Path
    progress: Progress

    @property
    def group(self) -> str:
        """The group of its cases."""
        return f"{self.cell.model} {self.cell.dtype}"


def audit_cases(gate: CellGate) -> list[Case]:
    """Every backend of a cell against its reference.

    Raises:
        ParityError: the reference does not run, or the question is malformed.
    """
    cell, lines = gate.cell, dict(gate.cell.lines)
    report = audit(
        cell.model, candidates=list(cell.backends), reference=cell.reference, miniature=cell.synthetic,
        seed=gate.seed, dtype=cell.dtype, device=cell.device, probes=cell.probes, repair=cell.repair,
        install=gate.install, out=gate.out / slug(gate.group), progress=gate.progress,
    )  # fmt: skip
    own = [
        replace(case, file=cell.file, line=lines.get(str(ref), 0))
        for ref, name, one in zip(cell.backends, labels(report), report.candidates, strict=True)
        for case in candidate_cases(gate.group, name, one)
    ]
    named = {(case.name, case.message) for case in own}
    return [*own, *(case for case in cases_of(report) if (case.name, case.message) not in named)]
