"""Run one audit, stage by stage: pre-flight → capture → compare → localise → identify → repair → verify → report."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from parity_audit.audit.baseline import with_baseline_comparison
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
    """Judge every candidate against the reference, write the report, and return it.

    If an earlier report is given as `baseline`, the new one is compared with it.

    Raises:
        NotJudged: the reference could not be captured, so no candidate can be judged.
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
    return _written(report if baseline is None else with_baseline_comparison(report, baseline), workspace.out)


def captured_alone(context: AuditContext, reference: BackendRef, out: Path) -> list[str]:
    """Capture a reference and its judge, move the captures to `out`, and return the names of their folders there.

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
    """Return the session of the reference and the session of its judge: the same one if the reference can run in float64."""
    session = context.session(reference, "reference")
    if session.plan.backend_key in FLOAT64_BACKENDS:
        return session, session
    return session, context.session(BackendRef(name=JUDGES), "judge")


def _written(report: Report, folder: Path) -> Report:
    """Write the report, and return it with the path of its file.

    If it cannot be written, it is returned with the reason, because it is printed in any case.
    """
    try:
        path = write_report(report, folder)
    except NotJudged as error:
        return dataclasses.replace(report, not_tested=(*report.not_tested, NotTested(what=FILES, why=error.message)))
    return dataclasses.replace(report, environment={**report.environment, "report": str(path)})


def _take_reference(session: Session, judging: Session, context: AuditContext) -> Reference:
    """Capture the reference, the fingerprints of its weights, and its judge. Raises NotJudged if that fails."""
    workspace, plan = context.workspace, context.plan
    keep = workspace.keeps_loaded(plan.checkpoint)
    return take_reference(session, judging, plan.probes, folder=workspace.captures, keep=keep)


def _self_check(session: Session, truth: Reference, context: AuditContext) -> list[str]:
    """Check the reference against its spec and against itself, and return one line per departure.

    If the check fails with an exception, the line says so; the candidates are judged in any case.
    """
    try:
        out = context.workspace.scratch("self-check")
        departing = departures(truth.capture, session.plan)
        judge = None if context.quick else truth.judge  # without a judge the check needs no further run
        notes = reference_notes(session, truth.capture, judge, out, departing)
        return [*notes, *compare_with(truth, departing)]
    except Exception as error:
        return [f"the self-check broke off: {explained(error).message}"]


def _with_sensitivity(truth: Reference, context: AuditContext) -> Reference:
    """Return the reference with the measured effect of small errors, for detection limits.

    It is measured while the judge is loaded and before any candidate is. Without a judge, with `--quick` or without
    `limits` it is not measured.
    """
    if truth.judge is None or context.quick or not context.limits:
        return truth
    context.progress.update("limits", "the smallest errors that this run can see")
    found = measure(
        truth.judging, truth.judge, truth.floor, dtype=truth.dtype,
        small=context.workspace.keeps_loaded(context.plan.checkpoint), own=truth.judging is truth.session,
        out=context.workspace.scratch("limits"),
    )  # fmt: skip
    return dataclasses.replace(truth, sensitivity=found)
