"""The stages as a list of calls. The command line and notebooks both start here.

resolve → pre-flight → capture → compare → localise → identify → repair → verify → report
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parity_audit.audit.context import AuditContext
from parity_audit.audit.reporting import environment_of, probes_of, weights_of
from parity_audit.audit.run import run_audit
from parity_audit.capture.plan import opened
from parity_audit.capture.store import Capture, open_capture
from parity_audit.capture.take import reusable_capture
from parity_audit.compare.deltas import compare
from parity_audit.compare.verdict import first_divergence, judge_comparison
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import UsageError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import Candidate, Report
from parity_audit.core.types import BackendRef, NotTested
from parity_audit.core.wire import FLOAT64
from parity_audit.envs.build import default_candidates, list_envs, python_for
from parity_audit.envs.build import remove_env as delete_env
from parity_audit.envs.health import health
from parity_audit.envs.recipes import recipe_for, table
from parity_audit.repair.outcome import exit_code_of, side_of
from parity_audit.specs.load import list_specs
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import knob_values

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
    hooks: bool = False,
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
        reference: the backend that is believed.
        miniature: "mini", "small" or "full" for seeded weights with the architecture's real constants.
        hooks: also edit every hook of a port at parity, and compare with the same edit in the reference.
        target: max-abs logit difference that a repaired candidate should reach.
        install: allow creating environments.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the reference could not be captured, so nothing can be said about anybody.
    """
    refs = _candidates(candidates, device, install)
    workspace, plan = opened(
        out, model, synthetic=miniature, seed=seed, weights=weights, probes=probes, dtype=dtype, device=device
    )
    context = AuditContext(
        plan=plan, workspace=workspace, install=install, tf32=tf32, target=target, repair=repair, hooks=hooks,
        progress=progress,
    )  # fmt: skip
    return run_audit(context, _ref(reference), refs, accept_patched=accept_patched)


def capture(
    model: str,
    backend: BackendLike,
    *,
    out: Path,
    miniature: str | None = None,
    seed: int = 0,
    weights: Path | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    probes: Sequence[str] | None = None,
    install: bool = True,
    tf32: bool = False,
    judge: bool = False,
    progress: Progress = SILENT,
) -> Path:
    """Capture one backend into `out`; with `judge`, its true-float64 run into `out/judge` as well.

    Raises:
        UsageError: the question is malformed.
        NotJudged: the backend failed.
    """
    workspace, plan = opened(
        out, model, synthetic=miniature, seed=seed, weights=weights, probes=probes, dtype=dtype, device=device
    )
    context = AuditContext(
        plan=plan, workspace=workspace, install=install, tf32=tf32, target=0.0, repair=False, hooks=False,
        progress=progress,
    )  # fmt: skip
    session = context.session(_ref(backend), "capture")
    try:
        taken = [reusable_capture(session, plan.probes, workspace.captures, with_weights=True)]
        _copy(taken[0], out)
        if judge:
            taken.append(reusable_capture(session, plan.probes, workspace.captures, precision=FLOAT64))
            _copy(taken[1], out / "judge")
    finally:
        session.release()
        workspace.drop_working()
    workspace.drop(taken)
    return out


def diff(a: Path, b: Path, *, judge: Path | None = None, progress: Progress = SILENT) -> Report:
    """Compare two captures on disk: `a` is the reference, `b` the candidate. `a/judge` is used where it exists.

    Raises:
        CaptureBroken: one of them is not a capture, or a file is missing, truncated or altered.
        UsageError: they were taken with different tokens.
    """
    started = time.perf_counter()
    reference, candidate = open_capture(a), open_capture(b)
    judge = judge or (a / "judge" if (a / "judge").is_dir() else None)
    truth = open_capture(judge) if judge else None
    _same_tokens(reference, candidate)
    progress.update("compare", f"{b} against {a}")
    comparison = compare(candidate, reference, truth, dtype=reference.manifest.dtype)
    verdict, why = judge_comparison(comparison)
    first = first_divergence(comparison)
    about = candidate.manifest.description
    result = Candidate(
        backend=candidate.manifest.backend, package=about.package if about else "", version=about.version if about else "",
        settings=about.settings if about else {}, dtype=candidate.manifest.dtype, device=candidate.manifest.device,
        verdict=verdict, why=why, logits=comparison.logits, sites=comparison.sites,
        first_divergence={"site": first.site, "layer": first.layer, "probe": first.probe} if first else None,
        not_visible=candidate.manifest.not_visible,
        not_tested=(*comparison.not_tested, NotTested(what="causes", why="two captures cannot be replayed")),
    )  # fmt: skip
    return Report(
        model=reference.manifest.checkpoint.repo_id, architecture="", spec="", weights=weights_of(reference.manifest.checkpoint),
        reference=side_of(reference), judge=side_of(truth) if truth else None, probes=probes_of(reference),
        candidates=(result,), environment=environment_of([reference, candidate]),
        seconds={"total": time.perf_counter() - started}, exit_code=exit_code_of([result], accept_patched=False),
    )  # fmt: skip


def _ref(backend: BackendLike) -> BackendRef:
    return backend if isinstance(backend, BackendRef) else parse_backend(backend)


def _candidates(wanted: Sequence[BackendLike] | None, device: str, install: bool) -> list[BackendRef]:
    refs = [_ref(item) for item in wanted] if wanted else default_candidates(device, install=install)
    if not refs:
        raise UsageError(
            "no candidate can run here",
            code="no-candidate",
            hint="run `parity-audit doctor`, or name one with --candidate",
        )
    for ref in refs:
        recipe_for(ref, device)  # a malformed version is refused before anything is run
    return refs


def _copy(taken: Capture, out: Path) -> None:
    shutil.copytree(taken.folder, out, dirs_exist_ok=True)


def _same_tokens(reference: Capture, candidate: Capture) -> None:
    ours = {probe.name: probe for probe in candidate.probes}
    for probe in reference.probes:
        other = ours.get(probe.name)
        if other is not None and (other.token_ids, other.mask) != (probe.token_ids, probe.mask):
            raise UsageError(
                f"probe `{probe.name}` has different tokens in the two captures", code="different-tokens",
                hint="take both captures with the same model, --seed and --probe",
            )  # fmt: skip


def specs() -> tuple[Spec, ...]:
    """Every shipped spec."""
    return list_specs()


@dataclass(frozen=True, kw_only=True)
class ShownSpec:
    """A model's constants: (knob, value, backends that can set it)."""

    repo_id: str
    spec: Spec
    knobs: tuple[tuple[str, object, tuple[str, ...]], ...]


def show_spec(model: str) -> ShownSpec:
    """The constants of a model and where they can be set. Raises UsageError for an unknown model."""
    resolved = resolve_model(model)
    values = knob_values(resolved.spec, resolved.config)
    backends = resolved.spec.content.backends
    rows = tuple(
        (
            knob,
            known.value,
            tuple(name for name, part in backends.items() if (item := part.knobs.get(knob)) and item.edits),
        )
        for knob, known in values.items()
    )
    return ShownSpec(repo_id=resolved.repo_id, spec=resolved.spec, knobs=rows)


def envs() -> list[tuple[str, str, int]]:
    """(key, backend, bytes) of every environment on disk."""
    return list_envs()


def tested_releases() -> list[tuple[str, list[str]]]:
    """Releases with a tested recipe, by backend."""
    return [(name, entry["known"]) for name, entry in table()["backends"].items()]


def create_env(backend: BackendLike, *, device: str = "cpu", progress: Progress = SILENT) -> str:
    """Make the environment of a backend; returns its interpreter. Raises EnvFailed."""
    return python_for(_ref(backend), device=device, progress=progress).python


def remove_env(key: str) -> None:
    """Delete an environment. Raises UsageError when there is none of that name."""
    if not delete_env(key):
        known = ", ".join(name for name, _, _ in list_envs())
        raise UsageError(f"no environment `{key}`", code="unknown-env", expected=known or "none is there")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of `doctor`."""

    name: str
    ok: bool
    why: str


def doctor() -> list[Check]:
    """What can run here, and why not."""
    return [Check(name=name, ok=ok, why=why) for name, ok, why in health()]
