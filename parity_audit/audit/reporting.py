"""The parts of a Report that come from the plan and the captures rather than from a candidate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from parity_audit.audit.context import AuditContext
from parity_audit.audit.outcome import backend_facts, side_of
from parity_audit.audit.reference import Reference
from parity_audit.capture.store import Capture
from parity_audit.core.report import Candidate, Report
from parity_audit.core.types import NotTested, Probe
from parity_audit.report.environment import this_machine

NOT_ASKED = "this run was asked for its verdict alone (limits=False)"
QUICK = (
    NotTested(
        what="the reference against itself (causality, padding, its other attention kernel)", why="--quick runs it once"
    ),
    NotTested(what="detection limits", why="--quick does not measure the smallest errors that a run can see"),
)
"""What `--quick` leaves out of every audit, in addition to probes and repair."""
ON_GPU = "nothing was run on a GPU"


def report_of(
    context: AuditContext, truth: Reference, notes: Sequence[str], results: Sequence[Candidate],
    captures: Sequence[Capture], code: int, seconds: float,
) -> Report:  # fmt: skip
    """Return the report of an audit whose reference could be captured."""
    plan = context.plan
    gaps = () if plan.device != "cpu" else (NotTested(what="device", why=ON_GPU),)
    if context.quick:
        gaps = (*QUICK, *gaps)
    elif not context.limits:
        gaps = (*gaps, NotTested(what="detection limits", why=NOT_ASKED))
    gaps = (*plan.left_out, *gaps)
    return Report(
        model=plan.model.repo_id, architecture=plan.model.spec.architecture, spec=Path(plan.model.spec.file).name,
        weights=plan.checkpoint.in_reports, reference=side_of(truth.capture, notes),
        judge=side_of(truth.judge) if truth.judge else None, probes=probes_of(truth.capture), candidates=tuple(results),
        environment=environment_of(captures), seconds=_seconds(truth, seconds), exit_code=code, not_tested=gaps,
    )  # fmt: skip


def _seconds(truth: Reference, total: float) -> dict[str, float]:
    own = {} if truth.sensitivity is None else {"detection limits": truth.sensitivity.seconds}
    return {"total": total, **own}


def environment_of(captures: Sequence[Capture]) -> dict[str, object]:
    """Return the facts about this machine and about every backend that ran on it."""
    return {**this_machine(), "backends": backend_facts(captures)}


def probes_of(taken: Capture) -> tuple[dict[str, object], ...]:
    """Return name, shape, purpose and a hash of the tokens of every probe of a capture."""
    return tuple(
        {
            "name": probe.name,
            "shape": [probe.shape[0], probe.length],
            "purpose": probe.purpose,
            "tokens": tokens_hash(probe),
            **({"positions": list(probe.kept)} if probe.kept else {}),
        }
        for probe in taken.probes
    )


def tokens_hash(probe: Probe) -> str:
    """Return a hash of 16 hex digits of a probe's tokens, its mask and the steps in which it is decoded."""
    told = json.dumps([probe.token_ids, probe.mask, probe.decode_from, *([probe.at_once] if probe.at_once > 1 else [])])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
