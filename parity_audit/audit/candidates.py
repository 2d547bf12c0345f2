"""The candidates of an audit, one after the other."""

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
from parity_audit.capture.store import SPENT, Capture
from parity_audit.capture.take import plan_key, reusable_capture
from parity_audit.capture.workspace import Workspace
from parity_audit.core.errors import explained
from parity_audit.core.progress import REUSE
from parity_audit.core.report import Candidate


def judge_all(
    sides: Sequence[Side], truth: Reference, context: AuditContext, rights: RightReferences
) -> tuple[list[Candidate], list[Capture]]:
    """Every candidate in turn; one that fails, in whatever way, is reported, and the others go on."""
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
        with contextlib.suppress(OSError):  # without room for it, the capture stays
            keep_result(result, taken, question)
        return result
    except Exception as error:
        known = explained(error, str(_logged(error, workspace, side)))
        if known.code == CHANGED:
            for owner in (truth, rights):
                owner.release()  # what they have loaded since may be what the candidate wrote
        return failed_candidate(side.ref, known, context.plan.dtype, context.plan.device)
    finally:
        side.release()
        if context.scratch is not None or not truth.replays:
            workspace.scratch(side.role)  # what only this candidate's diagnosis asked for
            truth.replays.clear()  # they lay there
        if context.scratch is not None:
            _without_tensors_of_failed(captures[1:])


def _without_tensors_of_failed(captures: Sequence[Capture]) -> None:
    """Under a bound the next candidate needs the room that one without a result left taken."""
    for capture in captures:
        if not (capture.folder / SPENT).exists():
            shutil.rmtree(capture.folder, ignore_errors=True)


def _logged(error: Exception, workspace: Workspace, side: Side) -> Path:
    """The side's log, with the traceback of what went wrong in this process."""
    log = workspace.log(f"{side.role}-{side.ref}")
    with contextlib.suppress(OSError), log.open("a") as stream:
        traceback.print_exception(error, file=stream)
    return log
