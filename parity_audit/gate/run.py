"""The gate from what it is asked to what it says: changed specs, changed pins, the cells of a matrix."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from parity_audit.core.errors import EXIT_OK, SpecError, UsageError
from parity_audit.core.gate import Case, GateReport, exit_code_of_cases, with_nothing_said
from parity_audit.core.progress import SILENT, Progress
from parity_audit.gate.audit_cases import CellGate, audit_cases
from parity_audit.gate.cells import Cell, cells_of
from parity_audit.gate.changes import Changes, changes_since
from parity_audit.gate.retry import asked
from parity_audit.gate.spec_cases import SpecGate, invalid, spec_cases
from parity_audit.matrix.ask import runs
from parity_audit.matrix.cells import Matrix
from parity_audit.matrix.cells import cells as cells_of_matrix
from parity_audit.report.environment import this_machine
from parity_audit.specs.load import OWN_SPECS, list_specs, load_spec
from parity_audit.specs.schema import Spec

SYNTHETIC = "mini"
DTYPE = "float32"
"""Of audits that changed pins ask for: the only one that can prove a port right."""


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """What a gate is asked.

    `since`: the commit that the change is counted from; `matrix`: a file of audits; `specs`: the folder of one's own
    specs; `models`: what changed pins are tried on, the first model of each own spec (of each shipped one where there is
    none) when empty; `backends` judge changed specs, every one that runs here when None; `retries` of what the machine failed at;
    `untouched_passes`: a change that touches no spec and no pin is no failure.
    """

    since: str = ""
    matrix: Path | None = None
    specs: Path = Path("model_specs")
    models: tuple[str, ...] = ()
    backends: tuple[str, ...] | None = None
    mutate: bool = True
    retries: int = 1
    seed: int = 0
    install: bool = True
    untouched_passes: bool = False
    out: Path = Path("parity-audit-ci")
    progress: Progress = SILENT


def run_gate(options: GateOptions) -> GateReport:
    """Judge what a change touches, and what a matrix asks for.

    Raises:
        UsageError: neither was given, no repository, no such commit, or a matrix that cannot be read.
    """
    if not options.since and options.matrix is None:
        raise UsageError(
            "nothing to judge was named", code="ci-nothing", expected="--since COMMIT, or --matrix FILE",
            hint="in a pull request: --since origin/main",
        )  # fmt: skip
    started = time.perf_counter()
    began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    cells = cells_of(options.matrix) if options.matrix else []
    changes = changes_since(options.since, options.specs, Path.cwd()) if options.since else None
    cases = tuple(_cases(options, changes, cells))
    untouched = options.untouched_passes and not cases
    cases = cases if untouched else with_nothing_said(cases)
    return GateReport(
        title="parity-audit ci", cases=cases, notes=_notes(options, changes, cells), started=began,
        seconds=time.perf_counter() - started, environment=this_machine(),
        exit_code=EXIT_OK if untouched else exit_code_of_cases(cases),
    )  # fmt: skip


def _cases(options: GateOptions, changes: Changes | None, cells: Sequence[Cell]) -> Iterator[Case]:
    """Everything that is asked, one run after the other."""
    own: list[Spec] = []
    if changes is not None:
        own, broken = _loaded(changes, options.specs)
        yield from broken
        cells = [*cells, *_pinned(options, changes, own)]
        for spec, file in zip(own, _relative(own, changes.root), strict=True):
            if Path(file) in changes.specs:
                gate = SpecGate(
                    spec=spec, file=file, backends=options.backends, mutate=options.mutate, seed=options.seed,
                    install=options.install, out=options.out / "specs", progress=options.progress,
                )  # fmt: skip
                yield from asked(partial(spec_cases, gate), group=gate.group, retries=options.retries)
    for cell in cells:
        one = CellGate(cell=cell, install=options.install, out=options.out / "audits", progress=options.progress)
        yield from asked(partial(audit_cases, one), group=cell.group, retries=options.retries)


def _loaded(changes: Changes, folder: Path) -> tuple[list[Spec], list[Case]]:
    """The specs of the folder, found before shipped ones from here on; a changed one that is broken is a failure."""
    found, broken = [], []
    root = changes.root.resolve()
    for path in sorted(folder.resolve().glob("*.yaml")):
        if path.name.startswith("_"):
            continue
        try:
            found.append(load_spec(path))
        except SpecError as error:
            if path.relative_to(root) in changes.specs:
                broken.append(invalid(path.relative_to(root).as_posix(), error))
    own = [spec for spec in found if spec.content.models]
    os.environ[OWN_SPECS] = os.pathsep.join(spec.file for spec in own)
    return own, broken


def _relative(specs: Sequence[Spec], root: Path) -> list[str]:
    return [Path(spec.file).relative_to(root.resolve()).as_posix() for spec in specs]


def _pinned(options: GateOptions, changes: Changes, own: Sequence[Spec]) -> list[Cell]:
    """Changed pins as audits: every release that is new, on every model."""
    if not changes.pins:
        return []
    models = options.models or tuple(spec.first_model for spec in own or list_specs())
    backends = tuple({str(pin.backend): pin.backend for pin in changes.pins}.values())
    places = tuple((str(pin.backend), (pin.file, pin.line)) for pin in changes.pins)
    matrix = Matrix(
        models=models, candidates=tuple(map(str, backends)), synthetic=SYNTHETIC, seed=options.seed, dtypes=(DTYPE,)
    )
    return [Cell(asked=tuple(group), places=places) for group in runs(cells_of_matrix(matrix))]


def _notes(options: GateOptions, changes: Changes | None, cells: Sequence[Cell]) -> tuple[str, ...]:
    """What was looked at, in words."""
    notes = []
    if changes is not None:
        specs = ", ".join(map(str, changes.specs)) or "none"
        new = ", ".join(f"{pin.backend} ({pin.file}:{pin.line})" for pin in changes.pins) or "none"
        notes += [f"{changes.files} files changed since {options.since}; specs: {specs}; pins of engines: {new}"]
    notes += [f"{options.matrix}: {len(cells)} runs"] if cells else []
    return tuple(notes)
