"""One audit, stage by stage: pre-flight → capture → compare → localise → identify → repair → verify → report."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from parity_audit.audit.baseline import held_against
from parity_audit.audit.candidates import judge_all
from parity_audit.audit.context import AuditContext
from parity_audit.audit.outcome import exit_code_of
from parity_audit.audit.reference import FLOAT64_BACKENDS, JUDGES, Reference, take_reference
from parity_audit.audit.reporting import report_of
from parity_audit.audit.right_reference import compare_with
from parity_audit.capture.session import Session
from parity_audit.capture.side import Side
from parity_audit.checks.limits import measure
from parity_audit.checks.selfcheck import departures, reference_notes
from parity_audit.core.backend_ref import report_names
from parity_audit.core.errors import EXIT_NOT_JUDGED, NotJudged, explained
from parity_audit.core.progress import RUNS
from parity_audit.core.report import Report
from parity_audit.core.types import BackendRef, NotTested
from parity_audit.report.files import write_report

FILES = "the files of this report"


def run_audit(
    context: AuditContext, reference: BackendRef, candidates: Sequence[BackendRef], *, accept_patched: bool,
    baseline: Report | None = None,
) -> Report:  # fmt: skip
    """Judge every candidate against the reference, and write the report; with a `baseline`, held against that.

    Raises:
        NotJudged: the reference could not be captured, so nothing can be said about anybody.
    """
    started, workspace = time.perf_counter(), context.workspace
    sides = [Side(ref=ref, role=f"candidate-{number}", make=context.session) for number, ref in enumerate(candidates)]
    rights = context.right_references()
    with ExitStack() as stack:
        stack.callback(workspace.drop_working)
        session, judging = _believed(context, reference)
        for release in (session.release, judging.release, rights.release, *(side.release for side in sides)):
            stack.callback(release)
        for side in sides:
            side.settle()
        own = 2 if judging is session else 3
        context.progress.update(
            RUNS, f"{own} of the reference and its judge, {len(sides)} of candidates", total=own + len(sides)
        )
        with context.plan.guard.watched(session.label):
            truth = _take_reference(session, judging, context)
        sides[0].prepare()
        notes = [*truth.notes, *_self_check(session, truth, context)]
        truth = _with_sensitivity(truth, context)
        results, captures = judge_all(sides, truth, context, rights)
    code = exit_code_of(results, accept_patched=accept_patched)
    results = [
        dataclasses.replace(one, backend=name) for one, name in zip(results, report_names(candidates), strict=True)
    ]
    report = report_of(context, truth, notes, results, captures, code, time.perf_counter() - started)
    if code != EXIT_NOT_JUDGED:
        workspace.drop([*captures, *truth.held, *rights.held])
    return _written(report if baseline is None else held_against(report, baseline), workspace.out)


def captured_alone(context: AuditContext, reference: BackendRef, out: Path) -> list[str]:
    """The captures of a reference and its judge, moved to `out`; the names of their folders there.

    Raises:
        NotJudged: the reference could not be captured.
    """
    with ExitStack() as stack:
        stack.callback(context.workspace.drop_working)
        session, judging = _believed(context, reference)
        for owner in (session, judging):
            stack.callback(owner.release)
        with context.plan.guard.watched(session.label):
            truth = _take_reference(session, judging, context)
        taken = [truth.capture, *truth.held]
        for capture in taken:
            shutil.move(capture.folder, out / capture.folder.name)
    return [capture.folder.name for capture in taken]


def _believed(context: AuditContext, reference: BackendRef) -> tuple[Session, Session]:
    """The session of the reference, and the one that judges: the same where it can run in float64."""
    session = context.session(reference, "reference")
    if session.plan.backend_key in FLOAT64_BACKENDS:
        return session, session
    return session, context.session(BackendRef(name=JUDGES), "judge")


def _written(report: Report, folder: Path) -> Report:
    """The report, with the place of its file; or with the reason why it has none, for it is printed in any case."""
    try:
        path = write_report(report, folder)
    except NotJudged as error:
        return dataclasses.replace(report, not_tested=(*report.not_tested, NotTested(what=FILES, why=error.message)))
    return dataclasses.replace(report, environment={**report.environment, "report": str(path)})


def _take_reference(session: Session, judging: Session, context: AuditContext) -> Reference:
    """The reference, its judge, and its fingerprints. Raises NotJudged when it cannot be had."""
    workspace, plan = context.workspace, context.plan
    keep = workspace.keeps_loaded(plan.checkpoint)
    return take_reference(session, judging, plan.probes, folder=workspace.captures, keep=keep)


def _self_check(session: Session, truth: Reference, context: AuditContext) -> list[str]:
    """What the reference says of itself; a check that cannot be made is said, and takes nobody's result away."""
    try:
        out = context.workspace.scratch("self-check")
        departing = departures(truth.capture, session.plan)
        judge = None if context.quick else truth.judge  # without one nothing is run again
        notes = reference_notes(session, truth.capture, judge, out, departing)
        return [*notes, *compare_with(truth, departing)]
    except Exception as error:
        return [f"the self-check broke off: {explained(error).message}"]


def _with_sensitivity(truth: Reference, context: AuditContext) -> Reference:
    """Measured while the judge is loaded, before any candidate is; a reference without a judge has none."""
    if truth.judge is None or context.quick or not context.limits:
        return truth
    context.progress.update("limits", "the smallest errors that this run can see")
    found = measure(
        truth.judging, truth.judge, truth.floor, dtype=truth.dtype,
        small=context.workspace.keeps_loaded(context.plan.checkpoint), own=truth.judging is truth.session,
        out=context.workspace.scratch("limits"),
    )  # fmt: skip
    return dataclasses.replace(truth, sensitivity=found)
