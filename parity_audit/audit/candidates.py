"""The candidates of an audit, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from parity_audit.audit.context import AuditContext
from parity_audit.capture.side import Side
from parity_audit.capture.store import Capture
from parity_audit.capture.take import reusable_capture
from parity_audit.core.errors import ParityError, UsageError
from parity_audit.core.report import Candidate
from parity_audit.repair.candidate import audit_candidate
from parity_audit.repair.outcome import failed_candidate
from parity_audit.repair.reference import Reference
from parity_audit.repair.right_reference import RightReferences


def judge_all(
    sides: Sequence[Side], truth: Reference, context: AuditContext, rights: RightReferences
) -> tuple[list[Candidate], list[Capture]]:
    """Every candidate in turn; one that fails is reported, and the others go on."""
    results: list[Candidate] = []
    captures = [truth.capture]
    for side, following in zip(sides, [*sides[1:], None], strict=True):
        results.append(_judge_one(side, following, truth, context, captures, rights))
    return results, captures


def _judge_one(
    side: Side, following: Side | None, truth: Reference, context: AuditContext, captures: list[Capture],
    rights: RightReferences,
) -> Candidate:  # fmt: skip
    workspace = context.workspace
    try:
        session = side.ready()
        if not workspace.keeps_loaded(context.plan.checkpoint):
            truth.release()
        if following is not None:
            following.prepare()
        taken = reusable_capture(session, truth.probes, workspace.captures, with_weights=True)
        captures.append(taken)
        out = workspace.scratch(side.role)
        return audit_candidate(
            session, taken, truth, target=context.target, repair=context.repair, hooks=context.hooks, out=out,
            rights=None if context.match_reference else rights,
        )  # fmt: skip
    except ParityError as error:
        if isinstance(error, UsageError):
            raise
        return failed_candidate(side.ref, error, context.plan.dtype, context.plan.device)
    finally:
        side.release()
