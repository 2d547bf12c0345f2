"""One audit, stage by stage: pre-flight → capture → compare → localise → identify → repair → verify → report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from parity_audit.audit.candidates import judge_all
from parity_audit.audit.context import AuditContext
from parity_audit.audit.reporting import report_of
from parity_audit.capture.session import Session
from parity_audit.capture.side import Side
from parity_audit.core.errors import EXIT_NOT_JUDGED
from parity_audit.core.report import Report
from parity_audit.core.types import BackendRef
from parity_audit.diagnose.limits import measure
from parity_audit.diagnose.selfcheck import reference_notes
from parity_audit.repair.outcome import exit_code_of
from parity_audit.repair.reference import JUDGES, Reference, take_reference
from parity_audit.report.files import write_report


def run_audit(
    context: AuditContext, reference: BackendRef, candidates: Sequence[BackendRef], *, accept_patched: bool
) -> Report:
    """Judge every candidate against the reference, and write the report.

    Raises:
        NotJudged: the reference could not be captured, so nothing can be said about anybody.
    """
    started, workspace = time.perf_counter(), context.workspace
    session = context.session(reference, "reference")
    judging = session if session.plan.backend_key == JUDGES else context.session(BackendRef(name=JUDGES), "judge")
    sides = [Side(ref=ref, role=f"candidate-{number}", make=context.session) for number, ref in enumerate(candidates)]
    rights = context.right_references()
    try:
        truth = _take_reference(session, judging, context)
        sides[0].prepare()
        own = reference_notes(session, truth.capture, truth.judge, workspace.scratch("self-check"))
        notes = [*truth.notes, *own]
        truth = _with_sensitivity(truth, context)
        results, captures = judge_all(sides, truth, context, rights)
    finally:
        rights.release()
        for side in sides:
            side.release()
        session.release()
        judging.release()
        workspace.drop_working()
    code = exit_code_of(results, accept_patched=accept_patched)
    report = report_of(context, truth, notes, results, captures, code, time.perf_counter() - started)
    path = write_report(report, workspace.out)
    if code != EXIT_NOT_JUDGED:
        workspace.drop([*captures, *truth.held, *rights.held])
    return dataclasses.replace(report, environment={**report.environment, "report": str(path)})


def _take_reference(session: Session, judging: Session, context: AuditContext) -> Reference:
    """The reference, its judge, and its fingerprints. Raises NotJudged when it cannot be had."""
    workspace, plan = context.workspace, context.plan
    keep = workspace.keeps_loaded(plan.checkpoint)
    return take_reference(session, judging, plan.probes, folder=workspace.captures, keep=keep)


def _with_sensitivity(truth: Reference, context: AuditContext) -> Reference:
    """Measured while the judge is loaded, before any candidate is; a reference without a judge has none."""
    if truth.judge is None:
        return truth
    context.progress.update("limits", "the smallest errors that this run can see")
    found = measure(
        truth.judging, truth.judge, truth.floor, dtype=truth.dtype,
        small=context.workspace.keeps_loaded(context.plan.checkpoint), own=truth.judging is truth.session,
        out=context.workspace.scratch("limits"),
    )  # fmt: skip
    return dataclasses.replace(truth, sensitivity=found)
