"""Judge the candidates of an audit, one after another."""

from __future__ import annotations

import contextlib
import shutil
import traceback
from collections.abc import Sequence
from pathlib import Path

from parity_audit.audit.candidate import audit_candidate
from parity_audit.audit.context import AuditContext
from parity_audit.audit.finite import with_finite_numbers
from parity_audit.audit.judged import keep_result, kept_result, question_of
from parity_audit.audit.outcome import failed_candidate
from parity_audit.audit.reference import Reference
from parity_audit.audit.right_reference import RightReferences
from parity_audit.audit.token_text import with_text
from parity_audit.capture.checkpoint import CHANGED
from parity_audit.capture.side import Side
from parity_audit.capture.store import RESULTS_ONLY, Capture
from parity_audit.capture.take import plan_key, reusable_capture
from parity_audit.capture.workspace import Workspace
from parity_audit.core.errors import explained
from parity_audit.core.progress import REUSE
from parity_audit.core.report import Candidate


def judge_all(
    sides: Sequence[Side], truth: Reference, context: AuditContext, rights: RightReferences
) -> tuple[list[Candidate], list[Capture]]:
    """Judge every candidate in turn, and return their results and the captures of the reference and the candidates.

    If a candidate fails with any exception, its failure becomes its result, and the next candidate is judged.
    """
    results: list[Candidate] = []
    captures = [truth.capture]
    question = question_of(truth, context)
    for side, following in zip(sides, [*sides[1:], None], strict=True):
        results.append(_judge_one(side, following, truth, context, captures, rights, question))
    return results, captures


def _judge_one(
    side: Side, following: Side | None, truth: Reference, context: AuditContext, captures: list[Capture],
    rights: RightReferences, question: str,
) -> Candidate:  # fmt: skip
    workspace, guard = context.workspace, context.plan.guard
    try:
        session = side.ready()
        if not workspace.keeps_loaded(context.plan.checkpoint):
            truth.release()
        if following is not None:
            following.prepare()
        before = kept_result(workspace.captures / plan_key(session, truth.probes), question)
        if before is not None:
            session.progress.update(
                REUSE, f"{session.label} in {context.plan.dtype}, judged by an audit that did not finish"
            )
            captures.append(before[1])
            return before[0]
        with guard.watched(session.label):
            taken = reusable_capture(session, truth.probes, workspace.captures, with_weights=True)
        captures.append(taken)
        out, repair = workspace.scratch(side.role), context.repair and not context.quick
        with guard.watched(session.label):
            result = audit_candidate(
                session, taken, truth, target=context.target, repair=repair, hooks=context.hooks, out=out,
                rights=None if context.match_reference else rights,
            )  # fmt: skip
        result = with_text(with_finite_numbers(result), context.plan.checkpoint)
        with contextlib.suppress(OSError):  # if the disk has no room for the result, the capture stays as it is
            keep_result(result, taken, question)
        return result
    except Exception as error:
        known = explained(error, str(_logged(error, workspace, side)))
        if known.code == CHANGED:
            for owner in (truth, rights):
                owner.release()  # they may have loaded the checkpoint after the candidate had changed its files
        return failed_candidate(side.ref, known, context.plan.dtype, context.plan.device)
    finally:
        side.release()
        if context.scratch is not None or not truth.replays:
            workspace.scratch(side.role)  # deletes the runs that only this candidate's diagnosis needed
            truth.replays.clear()  # the replays' files were in that folder
        if context.scratch is not None:
            _without_tensors_of_failed(captures[1:])


def _without_tensors_of_failed(captures: Sequence[Capture]) -> None:
    """Delete the captures for which no result was stored: with a bound on disk space the next candidate needs their room."""
    for capture in captures:
        if not (capture.folder / RESULTS_ONLY).exists():
            shutil.rmtree(capture.folder, ignore_errors=True)


def _logged(error: Exception, workspace: Workspace, side: Side) -> Path:
    """Append the traceback of `error` to the side's log, and return the path of the log."""
    log = workspace.log(f"{side.role}-{side.ref}")
    with contextlib.suppress(OSError), log.open("a") as stream:
        traceback.print_exception(error, file=stream)
    return log
