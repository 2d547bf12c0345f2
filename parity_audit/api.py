"""The stages as a list of calls. The command line and notebooks both start here.

resolve → pre-flight → capture → compare → localise → identify → repair → verify → report
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from parity_audit.capture.plan import AuditPlan, plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture, open_capture
from parity_audit.capture.take import take_capture
from parity_audit.capture.workspace import Workspace
from parity_audit.compare.deltas import compare
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import NotJudged, ParityError, UsageError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Candidate, Report, Side
from parity_audit.core.types import BackendRef
from parity_audit.core.wire import FLOAT64
from parity_audit.envs.build import default_candidates
from parity_audit.repair.candidate import Reference, audit_candidate
from parity_audit.repair.outcome import candidate_from_diff, exit_code_of, failed_candidate
from parity_audit.report.environment import this_machine

BackendLike = str | BackendRef


def audit(
    model: str,
    *,
    candidates: Sequence[BackendLike] | None = None,
    reference: BackendLike = "hf",
    miniature: str | None = None,
    seed: int = 0,
    weights: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    probes: Sequence[str] | None = None,
    target: float = 1e-5,
    repair: bool = True,
    out: Path | None = None,
    install: bool = True,
    tf32: bool = False,
    accept_patched: bool = False,
    progress: Progress = SILENT,
) -> Report:
    """Run the same tokens through every backend, say which agree, why the others do not, and what repairs them.

    Args:
        model: hub id, alias or local path.
        candidates: BACKEND strings; every candidate that can run here when None.
        miniature: "mini", "small" or "full" for seeded weights with the architecture's real constants.
        target: max-abs logit difference that a repaired candidate should reach.
        install: allow creating environments.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the reference could not be captured, so nothing can be said about anybody.
    """
    started = time.perf_counter()
    workspace = Workspace.open(out, model)
    plan = plan_audit(
        model, synthetic=miniature, seed=seed, weights=weights, probes=probes, dtype=dtype, device=device,
        cache=workspace.cache,
    )  # fmt: skip
    refs = [_ref(item) for item in candidates] if candidates else default_candidates(device, install=install)
    if not refs:
        raise UsageError("no candidate can run here", hint="run `parity-audit doctor`, or name one with --candidate")
    shared = _Shared(plan=plan, workspace=workspace, install=install, tf32=tf32, target=target, progress=progress)
    with shared.open_session(_ref(reference), "reference") as session:
        truth = _take_reference(session, shared)
        results = [_one(ref, number, truth, shared, repair) for number, ref in enumerate(refs)]
    report = _report(plan, truth, results, accept_patched, time.perf_counter() - started, workspace)
    return workspace.finish(report)
