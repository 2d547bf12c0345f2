"""An invariance report as blocks that every format draws: verdicts, conditions, operations and greedy completions."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.core.invariance_report import (
    AxisResult,
    CandidateInvariance,
    Completions,
    ConditionResult,
    Invariance,
    InvarianceReport,
    OperationClasses,
)
from parity_audit.core.limits import PARITY_RATIO, limit_of
from parity_audit.report.blocks import (
    BAD,
    BOLD,
    GOOD,
    SPACE,
    UNSURE,
    Block,
    Pairs,
    columns,
    heading,
    pairs,
    paragraph,
    styled,
)
from parity_audit.report.numbers import number, ratio, seconds

STYLES = {Invariance.BITWISE: GOOD, Invariance.CLASS_ONLY: GOOD, Invariance.NUMERIC: UNSURE, Invariance.BROKEN: BAD}
MEANINGS = (
    ("bitwise", "the same bits, whatever the condition"),
    ("class-only", "bits depend on the shape of the run alone, within the noise floor"),
    ("numeric", "bits depend on more than the shape, within the noise floor"),
    ("broken", "moves by more than rounding explains: run `parity-audit` on the backend"),
)
VERDICT_WIDTH = 12
WEAK = "did not fire: nothing differed in any condition, so equal bits may only mean that this probe is too weak"


def headline(report: InvarianceReport) -> str:
    """Return in one line whether the answers of the backends depend on the conditions of their run."""
    broken = [one.backend for one in report.candidates if one.verdict is Invariance.BROKEN]
    failed = [one.backend for one in report.candidates if one.verdict is Invariance.ERROR]
    if broken:
        return f"Broken: the answer of {', '.join(broken)} depends on the conditions of its run by more than rounding"
    if failed:
        return f"Nothing was judged about {', '.join(failed)}"
    if all(one.verdict is Invariance.BITWISE for one in report.candidates):
        return "Bitwise: the same bits in every condition that was run"
    moved = ", ".join(one.backend for one in report.candidates if one.verdict is not Invariance.BITWISE)
    return f"Within rounding: the last bits of {moved} depend on the conditions of the run, nothing more does"


def invariance_content(report: InvarianceReport, *, where: str = "") -> list[Block]:
    """Return the whole report; `where` is the path of invariance.json, which the last block names."""
    blocks: list[Block] = [styled((headline(report), BOLD), level=1)]
    for one in report.candidates:
        row = (one.verdict.value, f"{one.backend}: {one.why}")
        blocks.append(Pairs(rows=(row,), width=VERDICT_WIDTH, style=STYLES.get(one.verdict, UNSURE)))
    blocks += [SPACE, pairs(_context(report))]
    for one in report.candidates:
        blocks += [SPACE, *_candidate(one)]
    blocks += [SPACE, heading("Verdicts"), pairs(MEANINGS)]
    return [*blocks, SPACE, paragraph(f"report: {where}")] if where else blocks


def _context(report: InvarianceReport) -> list[tuple[str, str]]:
    subject = report.subject
    return [
        ("model", f"{report.model}, {report.dtype} on {report.device}"),
        ("followed", f"one sequence of {subject.get('tokens')} tokens, in batches of up to {subject.get('largest_batch')}"),
        ("noise floor", f"{report.reference} against its own run in true float64; broken above {PARITY_RATIO:g}x"),
        ("time", seconds(report.seconds.get("total", 0.0))),
    ]  # fmt: skip


def _candidate(one: CandidateInvariance) -> list[Block]:
    title = styled((one.backend, BOLD), (f"  {one.package} {one.version}", ""), level=2)
    if one.error:
        return [title, paragraph(one.error, indent=2)]
    blocks: list[Block] = [title, _matrix(one.axes), SPACE, heading("Run to run"), _matrix(one.run_to_run)]
    blocks += [SPACE, heading("What differs"), pairs(_differs(one))]
    if one.operations:
        blocks += [SPACE, heading("Operations on the model's own activations, by size"), _operations(one.operations)]
    if one.completions is not None:
        blocks += [SPACE, heading("Greedy completions"), *_completions(one.completions)]
    if one.not_tested:
        blocks += [SPACE, heading("Not tested"), pairs((gap.what, gap.why) for gap in one.not_tested)]
    return blocks


def _matrix(axes: Sequence[AxisResult]) -> Block:
    rows = []
    for axis in axes:
        if axis.verdict is None:
            continue  # listed under "Not tested", with the reason
        worst = _worst(axis.conditions)
        rows.append((
            axis.name, axis.verdict.value, axis.words,
            number(_ulp(axis.conditions)), number(_nats(axis.conditions)),
            ratio(worst) if worst is not None else "-",
        ))  # fmt: skip
    return columns(("condition", "verdict", "classes of equal bits", "ulp", "nats", "floors"), rows, right=(3, 4, 5))


def largest_change(one: CandidateInvariance) -> dict[str, float]:
    """Return the largest change over all conditions: in units of the last place, in nats, and in noise floors if known."""
    conditions = [condition for axis in (*one.axes, *one.run_to_run) for condition in axis.conditions]
    floors = _worst(conditions)
    found = {"ulp": _ulp(conditions), "nats": _nats(conditions)}
    return found if floors is None else {**found, "noise_ratio": floors}


def _nats(conditions: Sequence[ConditionResult]) -> float:
    return max((one.nats for one in conditions), default=0.0)


def _ulp(conditions: Sequence[ConditionResult]) -> float:
    """Return the largest change in units of the last place: of the model's outputs, or of all sites if no output changed."""
    outputs = [change.ulp for one in conditions for change in one.changed if change.site in ("returned", "logits")]
    return max(outputs or [change.ulp for one in conditions for change in one.changed] or [0.0])


def _worst(conditions: Sequence[ConditionResult]) -> float | None:
    ratios = [
        change.ratio for one in conditions for change in one.changed
        if change.ratio is not None and limit_of(change.site) == PARITY_RATIO
    ]  # fmt: skip
    return max(ratios, default=None)


def _differs(one: CandidateInvariance) -> list[tuple[str, str]]:
    control = f"fired: {one.control.where}" if one.control.fired else WEAK
    rows = [("negative control", control)]
    rows += [("first site", one.first_site)] if one.first_site else []
    named = next((own for own in one.operations if own.name == one.first_operation and own.switches), None)
    if one.first_operation is not None:
        classes = "" if named is None else f" ({named.kind}): {named.varied} {named.words}"
        rows.append(("first operation", one.first_operation + classes))
    return rows


def _operations(operations: Sequence[OperationClasses]) -> Block:
    rows = [
        (
            one.name + (f" (+{one.like_it} alike)" if one.like_it else ""), one.kind, one.varied, one.words,
            ", ".join(map(str, one.switches)) or "-", number(one.ulp),
        )
        for one in operations
    ]  # fmt: skip
    return columns(("operation", "kind", "varied", "classes of equal bits", "switches at", "ulp"), rows, right=(5,))


def _completions(drawn: Completions) -> list[Block]:
    blocks: list[Block] = [
        paragraph(
            f"{drawn.unique} unique of {drawn.runs}, {drawn.tokens} tokens each, in batches of {min(drawn.batches)} to "
            f"{max(drawn.batches)}",
            indent=2,
        )
    ]
    for one in drawn.divergent:
        kind = "a tie that rounding can turn" if one.tie else "a confident choice that flipped"
        text = (
            f"batch of {one.batch}, row {one.row}: token {one.position} is {one.token_id} and not {one.alone_token_id}; the two "
            f"best logits are {number(one.margin)} apart and moved by up to {number(one.moved)}: {kind}"
        )
        blocks.append(paragraph(text, indent=2))
    return blocks
