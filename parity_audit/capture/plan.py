"""Plan what an audit will run: the model, its weights, its probes, and one plan per backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from parity_audit.capture.bounded import ProbeSelection, Writes, reduce_to_fit
from parity_audit.capture.checkpoint import GuardedCheckpoint, guarded
from parity_audit.capture.probes import FIRST, plan_probes
from parity_audit.capture.prompts import Prompt, own_prompts, prompt_probes
from parity_audit.capture.session import SidePlan
from parity_audit.capture.workspace import Workspace
from parity_audit.core.errors import CannotRun, NotJudged, UsageError
from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.types import BackendRef, Checkpoint, NotTested, Probe
from parity_audit.envs.build import python_for
from parity_audit.specs import miniature
from parity_audit.specs.canonical import canonical
from parity_audit.specs.checkpoints import find_checkpoint
from parity_audit.specs.config_check import check_config
from parity_audit.specs.load import with_site_map
from parity_audit.specs.resolve import ResolvedModel, read_config, resolve_model
from parity_audit.specs.schema import Spec
from parity_audit.specs.special_tokens import special_ids
from parity_audit.specs.view import dims, reason_not_supported, taps

QUICK_PROBES = (FIRST,)
"""The probes that `--quick` runs if none is named: the one that shows every component."""


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """A resolved audit. `left_out` are the usual probes, or parts of them, that this audit does not run, and why."""

    model: ResolvedModel
    guard: GuardedCheckpoint
    config: dict[str, Any]
    """The checkpoint's config, in the canonical form."""
    probes: tuple[Probe, ...]
    dtype: str
    device: str
    prompts: tuple[Prompt, ...] = ()
    left_out: tuple[NotTested, ...] = ()

    @property
    def checkpoint(self) -> Checkpoint:
        """The weights that every backend is given."""
        return self.guard.checkpoint


def plan_audit(
    model: str,
    *,
    synthetic: str | None,
    seed: int,
    weights: Path | None,
    probes: Sequence[str] | None,
    dtype: str,
    device: str,
    cache: Path,
    copies: Path | None = None,
    texts: Sequence[str] = (),
    prompts: Path | None = None,
    chat: bool = False,
    quick: bool = False,
    disk: int | None = None,
    repair: bool = True,
    definition: bool = False,
    progress: Progress = SILENT,
) -> AuditPlan:
    """Resolve the model, find or make its weights, and choose the probes.

    Args:
        texts: the user's own prompts, and `prompts` a file with more; each becomes a row of an extra probe.
        chat: put prompts that are text through the checkpoint's chat template.
        quick: run probe `short` alone, unless `probes` names others.
        disk: bytes that the captures may take; probes are reduced or left out until they fit (see `bounded`).
        repair: whether patched runs are made, which need disk space as well; so does the `definition`, a further run that is
            made if the reference cannot run in float64.
        copies: the directory to which a small synthetic checkpoint is copied, so that backends never use the one in the cache.

    Raises:
        UsageError: unknown model or probe.
        NotJudged: the weights are neither on disk nor reachable.
    """
    resolved = resolve_model(model, weights)
    check_config(resolved.spec, resolved.config, weights or Path(model))
    if synthetic is not None:
        remake = partial(miniature.make, resolved, size=synthetic, seed=seed, root=cache / "synthetic")
        guard = guarded(remake(), remake=remake, copies=copies)
    else:
        guard = guarded(
            find_checkpoint(resolved, weights, homes=cache / "hub", progress=progress), remake=None, copies=None
        )
    folder = Path(guard.checkpoint.path)
    config = canonical(read_config(folder))
    planned = plan_probes(config, seed=seed, special=special_ids(folder, config))
    own = own_prompts(texts, prompts, guard.checkpoint, vocab=int(config["vocab_size"]), chat=chat)
    more = prompt_probes(own)
    chosen = affordable(
        planned, resolved.spec, config, wanted=probes, own=more, quick=quick, disk=disk, repair=repair,
        definition=definition,
    )  # fmt: skip
    return AuditPlan(
        model=resolved, guard=guard, config=config, probes=(*chosen.probes, *more), dtype=dtype, device=device, prompts=own,
        left_out=chosen.left_out,
    )  # fmt: skip


def affordable(
    planned: Sequence[Probe], spec: Spec, config: Mapping[str, Any], *, wanted: Sequence[str] | None, quick: bool,
    disk: int | None, repair: bool, own: Sequence[Probe] = (), definition: bool = False,
) -> ProbeSelection:  # fmt: skip
    """Return the probes that an audit runs besides the user's `own` texts: chosen by name or `quick`, within `disk` bytes.

    Raises:
        UsageError: an unknown name, or nothing fits.
    """
    chosen = choose_probes(planned, wanted or (QUICK_PROBES if quick else None))
    left_out = _left_out(planned, chosen) if quick else ()
    sites, sizes = taps(spec, "hf", config, ""), dims(spec, config)
    writes = Writes(taps=sites, sizes=sizes, repair=repair and not quick, definition=definition)
    fit = reduce_to_fit(chosen, own, writes, config, disk)
    return replace(fit, left_out=(*left_out, *fit.left_out))


def _left_out(planned: Sequence[Probe], chosen: Sequence[Probe]) -> tuple[NotTested, ...]:
    """Return one entry per probe that `--quick` does not run."""
    return tuple(
        NotTested(what=f"probe {probe.name}", why=f"left out by --quick: {probe.purpose}")
        for probe in planned
        if probe not in chosen
    )


def opened(out: Path | None, model: str, **question: Any) -> tuple[Workspace, AuditPlan]:
    """Open the audit's workspace and plan the audit (see `plan_audit`); if planning fails, the new folders are removed.

    `given`: a folder of captures that may replace runs (see `Workspace.open`).
    """
    workspace = Workspace.open(out, model, question.pop("given", None))
    try:
        plan = plan_audit(model, cache=workspace.cache, copies=workspace.working / "checkpoint", **question)
        require_judgeable(plan)
    except BaseException:
        workspace.abandon()
        raise
    return workspace, plan


def choose_probes(planned: Sequence[Probe], wanted: Sequence[str] | None) -> tuple[Probe, ...]:
    """Return the probes with these names, or all of them for None. Raises UsageError for an unknown name."""
    if not wanted:
        return tuple(planned)
    known = {probe.name: probe for probe in planned}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"unknown probe `{unknown[0]}`", code="unknown-probe", expected=", ".join(known))
    return tuple(known[name] for name in wanted)


def side_plan(plan: AuditPlan, ref: BackendRef, *, install: bool, progress: Progress) -> SidePlan:
    """Find or make the environment of one backend.

    Raises:
        EnvFailed: there is no environment, and none may be made or making it failed.
        CannotRun: the spec says that this release does not run the architecture.
    """
    environment = python_for(ref, device=plan.device, allow_install=install, progress=progress)
    key, version, dtype = environment.backend_key, environment.version, str(ref.settings.get("dtype", plan.dtype))
    why = reason_not_supported(plan.model.spec, key, version, plan.config, device=plan.device, dtype=dtype)
    if why:
        raise CannotRun(f"{ref} does not run {plan.model.spec.architecture}: {why}")
    sites = ref.settings.get("sites")
    spec = plan.model.spec if sites is None else with_site_map(plan.model.spec, Path(str(sites)))
    return SidePlan(
        ref=ref, environment=environment, checkpoint=plan.checkpoint, spec=spec, config=plan.config,
        dtype=plan.dtype, device=plan.device, max_positions=max(probe.shape[1] for probe in plan.probes) + 1,
        install=install, prompts=plan.prompts,
    )  # fmt: skip


def require_judgeable(plan: AuditPlan) -> None:
    """Raise NotJudged, before any engine starts, if there is no probe to run."""
    if not plan.probes:
        raise NotJudged("no probe to run", hint="drop `--probe` to run them all")
