"""Compare two captures on disk: the verdict of an audit without causes, because finding them needs further runs."""

from __future__ import annotations

import math
import time
from pathlib import Path

from parity_audit.audit.outcome import exit_code_of, side_of
from parity_audit.audit.reporting import environment_of, probes_of
from parity_audit.capture.place import JUDGE_FOLDER
from parity_audit.capture.store import Capture, open_capture
from parity_audit.checks.preflight import SKETCH_TOLERANCE, weight_findings
from parity_audit.compare.deltas import compare
from parity_audit.compare.verdict import first_divergence, judge_comparison
from parity_audit.core.errors import UsageError
from parity_audit.core.inputs import accepting, path
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Candidate, Finding, Report, Verdict
from parity_audit.core.types import NotTested, Probe
from parity_audit.offline.judge import require_judge

NO_JUDGE = "take the reference again with `parity-audit capture ... --judge`, or give its float64 capture with --judge"


@accepting(a=path, b=path, judge=path)
def diff(a: Path | str, b: Path | str, *, judge: Path | str | None = None, progress: Progress = SILENT) -> Report:
    """Compare two captures on disk: `a` is the reference, `b` the candidate. Without `judge`, `a/judge` is used if it exists.

    Raises:
        CaptureBroken: a folder is not a capture, or a file in it is missing, truncated or altered.
        UsageError: `a` and `b` are the same capture or have different tokens or weights, or the judge does not fit them.
    """
    started = time.perf_counter()
    reference, candidate = open_capture(a), open_capture(b)
    _two_captures(reference, candidate)
    _same_tokens(reference, candidate)
    judge = judge or (a / JUDGE_FOLDER if (a / JUDGE_FOLDER).exists() else None)
    truth = None if judge is None else open_capture(judge)
    if truth is not None:
        require_judge(truth, reference, candidate)
    weights, gaps = _weights(reference, candidate)
    progress.update("compare", f"{b} against {a}")
    result = _compared(reference, candidate, truth, weights, gaps)
    manifest = reference.manifest
    return Report(
        model=manifest.checkpoint.repo_id, architecture=manifest.architecture, spec=manifest.spec,
        weights=manifest.checkpoint.in_reports, reference=side_of(reference), judge=side_of(truth) if truth else None,
        probes=probes_of(reference), candidates=(result,),
        environment=environment_of([reference, candidate]),
        seconds={"total": time.perf_counter() - started}, exit_code=exit_code_of([result], accept_patched=False),
    )  # fmt: skip


def _compared(
    reference: Capture, candidate: Capture, truth: Capture | None, weights: list[Finding], gaps: list[NotTested]
) -> Candidate:
    comparison = compare(candidate, reference, truth, dtype=reference.manifest.dtype)
    verdict, why = judge_comparison(comparison)
    if verdict is Verdict.INCONCLUSIVE and truth is None and comparison.logits is not None:
        why = f"{why}; {NO_JUDGE}"
    first = first_divergence(comparison) if truth is not None else None
    manifest, about = candidate.manifest, candidate.manifest.description
    return Candidate(
        backend=manifest.backend, package=about.package if about else "", version=about.version if about else "",
        settings=about.settings if about else {}, dtype=manifest.dtype, device=manifest.device,
        verdict=Verdict.MISMATCH if weights else verdict, why=weights[0].message if weights else why,
        logits=comparison.logits, worst_tokens=comparison.worst_tokens, sites=comparison.sites, findings=tuple(weights),
        first_divergence={"site": first.site, "layer": first.layer, "probe": first.probe} if first else None,
        not_visible=(*manifest.not_visible, *comparison.not_comparable),
        not_tested=(
            *comparison.not_tested, *manifest.not_tested, *gaps,
            NotTested(what="causes", why="two captures cannot be replayed"),
        ),
    )  # fmt: skip


def _weights(reference: Capture, candidate: Capture) -> tuple[list[Finding], list[NotTested]]:
    """Return the loaded tensors that differ, and what could not be compared; the coarser dtype sets the tolerance.

    Tensors are compared if both captures recorded their values in short form (`weights`). The fingerprint of a checkpoint
    covers its files and their times, so that two downloads of one release may have different fingerprints. In that case
    the tensors themselves must agree.

    Raises:
        UsageError: the fingerprints differ, and the recorded tensors differ too or there are none.
    """
    sides = reference.manifest, candidate.manifest
    ours, theirs = (side.checkpoint.fingerprint for side in sides)
    dtype = max((side.dtype for side in sides), key=lambda name: SKETCH_TOLERANCE.get(name, math.inf))
    printed = {item.name for item in sides[0].weights} & {item.name for item in sides[1].weights}
    findings: list[Finding] = []
    gaps: list[NotTested] = []
    if printed and dtype in SKETCH_TOLERANCE:
        findings, gaps = weight_findings(sides[0].weights, sides[1].weights, dtype)
    if ours and theirs and ours != theirs and (findings or not printed):
        why = findings[0].message if findings else "neither capture can show that the tensors are equal all the same"
        raise UsageError(
            f"the two captures are of different checkpoints: {why}", code="different-checkpoints",
            where=str(candidate.folder), expected=f"fingerprint {ours}", found=f"fingerprint {theirs}",
            hint="take both captures with the same MODEL, --weights, --synthetic and --seed",
        )  # fmt: skip
    if not printed and not (ours and ours == theirs):
        gaps = [NotTested(what="weights", why="the captures do not say that they are of the same checkpoint")]
    return findings, gaps


def _two_captures(reference: Capture, candidate: Capture) -> None:
    if reference.folder.resolve() == candidate.folder.resolve():
        raise UsageError(
            "both sides are the same capture", code="same-capture", where=str(reference.folder),
            hint="give the directories of two captures: the reference first, then the candidate",
        )  # fmt: skip


def _same_tokens(reference: Capture, candidate: Capture) -> None:
    ours = {probe.name: probe for probe in candidate.probes}
    for probe in reference.probes:
        other = ours.get(probe.name)
        if other is not None and not _same_beginning(probe, other):
            raise UsageError(
                f"probe `{probe.name}` has different tokens in the two captures", code="different-tokens",
                hint="take both captures with the same model, --seed and --probe",
            )  # fmt: skip


def _same_beginning(a: Probe, b: Probe) -> bool:
    """Return whether two sides ran the same tokens, up to the length of the shorter probe."""
    first, second = (side.columns(0, min(a.shape[1], b.shape[1])) for side in (a, b))
    return (first.token_ids, first.mask) == (second.token_ids, second.mask)
