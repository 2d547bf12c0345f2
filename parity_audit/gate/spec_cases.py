"""Check a changed spec, one case per check.

The checks are: is the file valid, does the reference contradict a constant, would a wrong constant be noticed, and does every
backend agree with the reference and with the spec run as a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.core.errors import SpecError
from parity_audit.core.gate import Case, Status
from parity_audit.core.progress import Progress
from parity_audit.report.cases import status_of_error
from parity_audit.speccheck.check import FAILED, NOT_RUN, PairCheck, SpecCheck, check_spec
from parity_audit.speccheck.constants import Contradiction
from parity_audit.speccheck.executed import executed
from parity_audit.speccheck.mutate import NAMED_SHARE, mutated
from parity_audit.specs.places import knob_line
from parity_audit.specs.schema import Spec


@dataclass(frozen=True, kw_only=True)
class SpecGate:
    """A changed spec and how it is judged.

    `file` is relative to the repository. `backends` is None for all backends that run on this machine.
    """

    spec: Spec
    file: str
    backends: tuple[str, ...] | None
    mutate: bool
    seed: int
    install: bool
    out: Path
    progress: Progress

    @property
    def group(self) -> str:
        """The group of the spec's cases."""
        return f"spec {self.spec.name}"


def invalid(file: str, error: SpecError) -> Case:
    """Return the failed case of a file that is no valid spec; its line is taken from the error's `file:line:column`."""
    numbers = [part for part in error.where.partition("   ")[0].split(":")[1:] if part.isdigit()]
    return Case(
        group=f"spec {Path(file).stem}", name="schema", status=Status.FAILED, message=error.message,
        details="\n".join(error.lines()), rule=error.code, file=file, line=int(numbers[0]) if numbers else 1,
    )  # fmt: skip


def spec_cases(gate: SpecGate) -> Iterator[Case]:
    """Yield the cases of the constants, the backends, the changed constants and the spec as a program, each from its own runs.

    The last two are reported as not tested if the reference contradicts a constant.

    Raises:
        ParityError: the reference does not run the miniature.
    """
    done = check_spec(
        gate.spec, gate.backends, faults=False, seed=gate.seed, install=gate.install, progress=gate.progress
    )
    yield from _constants(gate, done)
    yield from (_pair(gate, pair, "against hf") for pair in done.pairs)
    if done.contradicted:
        why = "its constants have to be those of the reference first"
        for name in ("changed constants", "the spec as a program"):
            yield Case(group=gate.group, name=name, status=Status.NOT_TESTED, message=why, file=gate.file, line=1)
        return
    if gate.mutate:
        yield _mutations(gate)
    own = executed(
        gate.spec, gate.backends, out=gate.out / gate.spec.name, seed=gate.seed, install=gate.install,
        progress=gate.progress,
    )  # fmt: skip
    yield from (_pair(gate, pair, "against the spec as a program") for pair in own)


def _constants(gate: SpecGate, done: SpecCheck) -> list[Case]:
    """Return one failed case per contradicted constant, at its line in the spec, else a single case.

    The single case is an error if no component was compared with the spec's formulas, and has passed otherwise.
    """
    if done.contradicted:
        return [_contradicted(gate, one) for one in done.contradicted]
    if not done.components:
        why = "no component was held against the formulas"
        return [Case(group=gate.group, name="constants", status=Status.ERROR, message=why, file=gate.file, line=1)]
    said = f"{done.components} components are what the spec's formulas make of their inputs"
    return [Case(group=gate.group, name="constants", status=Status.PASSED, message=said, file=gate.file, line=1)]


def _contradicted(gate: SpecGate, one: Contradiction) -> Case:
    return Case(
        group=gate.group, name=f"constants: {one.knob or one.site}", status=Status.FAILED, message=str(one),
        rule=one.knob or "unexplained", file=gate.file, line=knob_line(Path(gate.spec.file), one.knob),
    )  # fmt: skip


def _pair(gate: SpecGate, pair: PairCheck, against: str) -> Case:
    """Return the case of one backend.

    If an error ended the check, the error's code decides the status (see `status_of_error`). An inconclusive verdict is an error.
    """
    status = {FAILED: Status.FAILED, NOT_RUN: Status.NOT_TESTED}.get(pair.status, Status.PASSED)
    if pair.error:
        status = status_of_error(pair.error)
    elif pair.verdict == "inconclusive":
        status = Status.ERROR
    return Case(
        group=gate.group, name=f"{pair.backend} {pair.version} {against}".replace("  ", " "), status=status,
        message=pair.why or pair.verdict, rule=pair.error or "parity", file=gate.file, line=1,
    )  # fmt: skip


def _mutations(gate: SpecGate) -> Case:
    """Return the case that says whether wrong constants would be noticed.

    It passes if at least the share `NAMED_SHARE` of the deliberately changed constants is contradicted by name.
    """
    found = mutated(gate.spec, seed=gate.seed, progress=gate.progress)
    rest = [one for one in found if not one.named]
    enough = bool(found) and len(found) - len(rest) >= NAMED_SHARE * len(found)
    return Case(
        group=gate.group, name="changed constants", status=Status.PASSED if enough else Status.FAILED,
        message=f"{len(found) - len(rest)} of {len(found)} changed constants are contradicted by name",
        details="\n".join(f"{one.knob} ({one.change}): {one.why}" for one in rest),
        rule=rest[0].knob if rest else "mutation", file=gate.file, line=_first_line(gate, [one.knob for one in rest]),
    )  # fmt: skip


def _first_line(gate: SpecGate, knobs: Sequence[str]) -> int:
    return knob_line(Path(gate.spec.file), knobs[0]) if knobs else 1
