"""Run the gate: judge changed specs, changed pins and the cells of a matrix, and return one report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from parity_audit.core.errors import EXIT_OK, SpecError, UsageError
from parity_audit.core.gate import Case, GateReport, exit_code_of_cases, with_error_if_nothing_compared
from parity_audit.core.progress import SILENT, Progress
from parity_audit.gate.audit_cases import CellGate, audit_cases
from parity_audit.gate.cells import Cell, cells_of
from parity_audit.gate.changes import Changes, changes_since
from parity_audit.gate.retry import run_with_retries
from parity_audit.gate.spec_cases import SpecGate, invalid, spec_cases
from parity_audit.matrix.ask import runs
from parity_audit.matrix.cells import Matrix
from parity_audit.matrix.cells import cells as cells_of_matrix
from parity_audit.report.environment import this_machine
from parity_audit.specs.load import OWN_SPECS, list_specs, load_spec
from parity_audit.specs.schema import Spec

SYNTHETIC = "mini"
DTYPE = "float32"
"""Dtype of the audits of changed pins. It is float32, the only dtype in which an audit can prove a port right."""


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """What a gate judges, and how.

    - `since`: the commit or branch from which changes are counted. No changes are judged if it is empty.
    - `matrix`: a file with the audits to run.
    - `specs`: the folder of the user's own specs.
    - `models`: the models on which changed pins are audited. If empty, the first model of each own spec, or of each shipped
      spec if there are no own ones.
    - `backends`: the backends that judge changed specs; None for all that run on this machine.
    - `mutate`: also check that wrong constants in a changed spec would be noticed.
    - `retries`: how often cases are repeated that failed because of the machine.
    - `seed`: seed of the synthetic checkpoints.
    - `install`: whether missing environments may be installed.
    - `untouched_passes`: whether the gate passes if there was nothing to judge, for example because the change touches neither
      a spec nor a pin.
    - `out`: the folder for reports.
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
    """Judge the specs and pins that a change touches and the cells of a matrix, and return the report.

    Raises:
        UsageError: neither a commit nor a matrix was given, there is no repository or no such commit, or the matrix cannot be
            read.
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
    cases = cases if untouched else with_error_if_nothing_compared(cases)
    return GateReport(
        title="parity-audit ci", cases=cases, notes=_notes(options, changes, cells), started=began,
        seconds=time.perf_counter() - started, environment=this_machine(),
        exit_code=EXIT_OK if untouched else exit_code_of_cases(cases),
    )  # fmt: skip


def _cases(options: GateOptions, changes: Changes | None, cells: Sequence[Cell]) -> Iterator[Case]:
    """Yield the cases of the changed specs, then of the matrix, then of the changed pins, from one run after another."""
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
                yield from run_with_retries(partial(spec_cases, gate), group=gate.group, retries=options.retries)
    for cell in cells:
        one = CellGate(cell=cell, install=options.install, out=options.out / "audits", progress=options.progress)
        yield from run_with_retries(partial(audit_cases, one), group=cell.group, retries=options.retries)


def _loaded(changes: Changes, folder: Path) -> tuple[list[Spec], list[Case]]:
    """Return the folder's specs that name a model, and a failed case for each changed spec that is broken.

    It also lists these specs in the environment variable `OWN_SPECS`, so that they take precedence over shipped ones from here on.
    """
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
    """Return the audits of changed pins: every newly pinned release on every model."""
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
    """Return the report's notes: how many files changed, which specs and pins are among them, and how many runs there were."""
    notes = []
    if changes is not None:
        specs = ", ".join(map(str, changes.specs)) or "none"
        new = ", ".join(f"{pin.backend} ({pin.file}:{pin.line})" for pin in changes.pins) or "none"
        notes += [f"{changes.files} files changed since {options.since}; specs: {specs}; pins of engines: {new}"]
    notes += [f"{options.matrix}: {len(cells)} runs"] if cells else []
    return tuple(notes)
