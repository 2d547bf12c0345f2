"""Run one backend under every condition, and give its verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from parity_audit.capture.session import Session
from parity_audit.core.errors import NotJudged
from parity_audit.core.invariance_report import AxisResult, CandidateInvariance, Control, Invariance
from parity_audit.core.sites import site_order
from parity_audit.core.types import NotTested
from parity_audit.core.wire import FLOAT64
from parity_audit.invariance import conditions
from parity_audit.invariance.completions import completions
from parity_audit.invariance.conditions import PAGE, RUN_TO_RUN, Condition, Ids
from parity_audit.invariance.distances import Floor, floors
from parity_audit.invariance.observe import observe, renamed
from parity_audit.invariance.operations import first_operation, operation_classes
from parity_audit.invariance.prefix import prefix_cache
from parity_audit.invariance.runs import Floors, Question, Runs, loading, pads
from parity_audit.invariance.verdict import axis, worst


def measured_floor(session: Session, question: Question, subject: Ids) -> dict[str, Floor]:
    """Measure the noise floor of every site on one sequence, from a native run of the reference and one in true float64.

    Raises:
        NotJudged: one of the runs captured nothing or holds numbers that are not finite, or the runs share no site.
    """
    whole, _ = conditions.alone(subject)
    seen = {
        "native": observe(session, renamed(whole, "native"), question.folder),
        "judge": observe(session, renamed(whole, "judge"), question.folder, precision=FLOAT64),
    }
    for name, one in seen.items():
        if one.gap or one.non_finite:
            why = one.gap or f"not finite at {one.non_finite[0]}"
            raise NotJudged(f"the noise floor was not measured: {name} run of {session.label}: {why}", code="no-floor")
    found = floors(seen["native"].values, seen["judge"].values)
    if not found:
        raise NotJudged(
            "the noise floor was not measured: the two runs of the reference share no site", code="no-floor"
        )
    return found


def audit_candidate(session: Session, question: Question, floor: Floors, long_floor: Floors) -> CandidateInvariance:
    """Run every condition on one backend, and return its result.

    Raises:
        NotJudged: the backend does not run, the run of the subject alone captured nothing, or no condition could be run.
    """
    started = time.perf_counter()
    session.load_settings = loading(session, question)
    runs = Runs(session=session, question=question, floor=floor, plan=question.planner())
    _bases(runs)
    planned = _planned(runs)
    for number, condition in enumerate(planned):
        question.progress.update("run", f"{session.label}: {condition.axis}, {condition.name}", number, len(planned))
        runs.test(condition)
    alone = conditions.alone(question.subject)[0]
    question.progress.update("operations", session.label)
    operations, gaps = operation_classes(session, alone, conditions.batch_sizes(question.bound), question.dtype)
    moved = max((result.logits_max_abs for _, _, result in runs.done), default=0.0)
    drawn, more = completions(session, runs.plan, question.completions, question.new_tokens, moved, question.folder)
    if not question.quick:
        _fresh_process(runs)
        prefix_cache(runs, question.long_subject, long_floor)
    axes = _axes(runs)
    batch, run_to_run = ([one for one in axes if (one.name in RUN_TO_RUN) is own] for own in (False, True))
    first_site = _first_site(axes)
    control = _control(batch)
    verdict = worst(one.verdict for one in axes)
    if verdict is None:
        raise NotJudged(f"no condition of {session.label} could be run", code="no-condition")
    about = session.description()
    return CandidateInvariance(
        backend=session.label, package=about.package, version=about.version, settings=about.settings, verdict=verdict,
        why=_why(verdict, axes, control), axes=tuple(batch), run_to_run=tuple(run_to_run), operations=operations,
        first_operation=first_operation(operations, first_site), first_site=first_site, control=control,
        completions=drawn, not_tested=(*_gaps(runs), *gaps, *more), seconds=time.perf_counter() - started,
    )  # fmt: skip


def _bases(runs: Runs) -> None:
    """Run the two base conditions: the subject alone in one pass, and alone with its last tokens decoded.

    If the first fails, NotJudged is raised. If only the second fails, the conditions that are compared with it are gaps.
    """
    for base in conditions.alone(runs.question.subject):
        seen = runs.see(base)
        if base.name == conditions.ALONE and (seen.gap or seen.non_finite):
            why = seen.gap or f"not finite at {seen.non_finite[0]}"
            raise NotJudged(f"{runs.session.label} does not run the subject alone: {why}", code="no-base")
        runs.bases[base.name] = seen


def _planned(runs: Runs) -> list[Condition]:
    question, plan = runs.question, runs.plan
    whole, _ = conditions.alone(question.subject)
    return [
        *conditions.again(whole, question.threads),
        *conditions.batches(plan, conditions.batch_sizes(question.bound)),
        *conditions.places(plan),
        *conditions.neighbours(plan),
        *(conditions.paddings(plan) if pads(runs.session) else []),
        *conditions.steps(plan, None if pads(runs.session) else PAGE),
    ]


def _fresh_process(runs: Runs) -> None:
    """Run the subject alone once more, after the backend was loaded again in a new process."""
    runs.session.release()
    whole, _ = conditions.alone(runs.question.subject)
    runs.test(Condition(axis=conditions.PROCESS, name="fresh process", probe=renamed(whole, "fresh").probe))


def _axes(runs: Runs) -> list[AxisResult]:
    names = dict.fromkeys(condition.axis for condition, _, _ in runs.done)
    return [
        axis(name, [one for one in runs.done if one[0].axis == name], runs.bases) for name in conditions.QUESTIONS
        if name in names
    ]  # fmt: skip


def _gaps(runs: Runs) -> Iterable[NotTested]:
    """Yield the conditions that were not run; those of one question with the same reason are one gap."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for condition, _, result in runs.done:
        if result.verdict is None:
            reasons.setdefault((condition.axis, result.gap), []).append(condition.name)
    if not pads(runs.session):
        yield NotTested(
            what=conditions.PADDING, why="the engine runs the tokens of all requests as one row, without padding"
        )
    for (name, why), which in reasons.items():
        yield NotTested(what=f"{name}: {', '.join(which)}", why=why)
    if runs.question.quick:
        yield NotTested(what=f"{conditions.PROCESS}, {conditions.PREFIX}", why="--quick loads each backend once")


def _control(batch: Sequence[AxisResult]) -> Control:
    """Return the negative control: whether any condition changed anything.

    If none did, equal bits may only mean that the probe cannot show a difference.
    """
    moved = [one for axis_ in batch for one in axis_.conditions if one.changed]
    if not moved:
        return Control(fired=False, where="")
    top = max(moved, key=lambda one: one.logits_max_abs)
    return Control(fired=True, where=f"{len(moved)} conditions differ, most at the logits: {top.axis}, {top.name}")


def _first_site(axes: Sequence[AxisResult]) -> str | None:
    """Return the first site, in the order in which the model computes them, that any condition changes."""
    found = [one.first_site for axis_ in axes for one in axis_.conditions if one.first_site is not None]
    return min(found, key=site_order, default=None)


def _why(verdict: Invariance, axes: Sequence[AxisResult], control: Control) -> str:
    if verdict is Invariance.BITWISE:
        weak = "" if control.fired else "; nothing differed anywhere, so this probe may be too weak to see a difference"
        return f"the same bits in every condition{weak}"
    named = [f"{axis_.name}: {one.name}" for axis_ in axes for one in axis_.conditions if one.verdict is verdict]
    reason = next(one.why for axis_ in axes for one in axis_.conditions if one.verdict is verdict)
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f"{', '.join(named[:3])}{more} ({reason})"
