"""The result of a gate as blocks, for the terminal and for the summary of a pull request."""

from __future__ import annotations

from parity_audit.core.errors import EXIT_MISMATCH, EXIT_OK
from parity_audit.core.gate import Case, GateReport, Status, counts
from parity_audit.report.blocks import BAD, BOLD, GOOD, SPACE, UNSURE, Block, Pairs, columns, heading, pairs, styled
from parity_audit.report.numbers import seconds

TO_LOOK_AT = (Status.FAILED, Status.ERROR, Status.INFRA, Status.FLAKE)
VERDICT_BY_EXIT_CODE = {EXIT_OK: ("Passed", GOOD), EXIT_MISMATCH: ("Failed", BAD)}
UNJUDGED = ("Not everything could be judged", UNSURE)


def headline(gate: GateReport) -> str:
    """Return the verdict and the number of cases of each status."""
    how_many = ", ".join(f"{count} {status.value}" for status, count in counts(gate.cases).items())
    return f"{VERDICT_BY_EXIT_CODE.get(gate.exit_code, UNJUDGED)[0]}: {how_many or 'no case'}"


def gate_content(gate: GateReport, *, where: str = "") -> list[Block]:
    """Return the verdict, the cases that a person should look at, those that passed, and those that were not tested."""
    style = VERDICT_BY_EXIT_CODE.get(gate.exit_code, UNJUDGED)[1]
    blocks: list[Block] = [
        styled((headline(gate), BOLD), level=1),
        *(_case(case, style) for case in _of(gate, TO_LOOK_AT)),
    ]
    passed, gaps = _of(gate, (Status.PASSED,)), _of(gate, (Status.NOT_TESTED,))
    if passed:
        rows = [(case.group, case.name, case.message) for case in passed]
        blocks += [SPACE, heading("Passed"), columns(("what", "asked", "said"), rows)]
    if gaps:
        blocks += [SPACE, heading("Not tested"), pairs((f"{case.group}: {case.name}", case.message) for case in gaps)]
    about = [("looked at", note) for note in gate.notes] + [("time", seconds(gate.seconds))]
    return [*blocks, SPACE, pairs([*about, *([("files", where)] if where else [])])]


def _case(case: Case, style: str) -> Pairs:
    """Return one case with its message and, if it is in a file, the place to repair."""
    place = [("at", f"{case.file}:{case.line}" if case.line else case.file)] if case.file else []
    rows = [(case.status.value, f"{case.group}: {case.name}"), ("", case.message), *place]
    return Pairs(rows=tuple(rows), width=12, style=style)


def _of(gate: GateReport, statuses: tuple[Status, ...]) -> list[Case]:
    return [case for case in gate.cases if case.status in statuses]
