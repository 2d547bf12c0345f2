"""Does editing a hook do what the same edit does in the reference?

A forward pass can be bit-identical and an edit still be lost: a hook may show a copy, or feed one of the two places that use a
tensor. So one hook at a time, in one middle block, is given the same edited tensor on every side (see `checks.changes`), and
the logits are compared as always: RMSE(candidate, judge) over the floor RMSE(reference, judge), all of them edited; the floor is
at least that without an edit. TransformerLens' hooks are edited by name, as their users do; what has no hook of a name is edited
at its module.

Beside a mismatch that no patch mends the candidate's own error is in every number; there only an edit without any effect is told.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.checks.by_name import NamedHooks
from parity_audit.checks.changes import MID, Change, Changes
from parity_audit.checks.limits import chosen_probe
from parity_audit.compare.floor import noise_ratio
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import TINY, limit_of
from parity_audit.core.report import HookEdit
from parity_audit.core.sites import LOGITS, RETURNED, layer_of, local_name, site_order
from parity_audit.core.types import NotTested, Probe, SiteTap
from parity_audit.core.wire import FLOAT64, NATIVE, RunRequest
from parity_audit.diagnose.evidence import f64, real
from parity_audit.specs.hook_names import VALUE, Hook, hooks
from parity_audit.specs.view import taps

NOT_EDITED = (LOGITS, RETURNED, "mlp.router_logits", "mlp.router_weights")
FLOORS_TO_MOVE = 100.0
"""Floors that an edit has to move the judge's logits by."""
READ_ONLY = ("vllm",)
NO_EFFECT = "the edit has no effect: the hook shows a tensor that nothing reads"
GUESSED = "not as in the reference; but where this tensor is read was guessed, and the port may compute attention in another way"
DROWNED = "it moves the logits; whether as it should is hidden by this port's own error"


@dataclass(frozen=True, kw_only=True)
class EditedSides:
    """Who is edited: the candidate, and the judging session twice, natively (the floor) and in float64.

    `agrees`: the candidate, as it is now, computes the reference's function.
    """

    candidate: Session
    judging: Session
    judge: Capture
    shown: Capture
    named: NamedHooks
    dtype: str
    out: Path
    agrees: bool


Outcome = HookEdit | NotTested


@one_thread()
def hook_edits(sides: EditedSides) -> tuple[list[HookEdit], list[NotTested]]:
    """Every hook and site of one middle block that both sides show, edited; and those where nothing could be learnt.

    Raises:
        NotJudged: a backend failed.
    """
    if sides.candidate.plan.backend_key in READ_ONLY:
        return [], [NotTested(what="hook edits", why=f"{sides.candidate.label} can be read here, not edited")]
    probe = chosen_probe(sides.judge.probes)
    try:
        found = list(_edited(sides, probe))
    finally:
        shutil.rmtree(sides.out, ignore_errors=True)
    edits = [item for item in found if isinstance(item, HookEdit)]
    return edits, [item for item in found if isinstance(item, NotTested)]


def _edited(sides: EditedSides, probe: Probe) -> Iterator[Outcome]:
    run = _Runs(sides, probe)
    for change in _changes(sides, probe):
        yield change if isinstance(change, NotTested) else run.outcome(change)


def _changes(sides: EditedSides, probe: Probe) -> Iterator[Change | NotTested]:
    """By name where TransformerLens has a name for it, else by site; in one middle block and outside the blocks."""
    shared = sides.judge.sites(probe.name) & sides.shown.sites(probe.name)
    middle = max((layer for site in shared if (layer := layer_of(site)) is not None), default=0) // 2
    make = Changes(sides.judge, probe, sides.candidate.plan)
    named: set[str] = set()
    for item in sides.named.hooks:
        hook = item.hook
        named |= {hook.site} if hook.promises == VALUE else set()
        if layer_of(hook.site) in (None, middle):
            yield _by_name(sides, make, hook)
    inputs = {tap.site for tap in _taps(sides.candidate) if tap.take.partition(":")[0] == "input"}
    for site in sorted(shared - named, key=site_order):
        # The input of the norm is the norm's alone: an edit there is no edit of the residual stream, in no port.
        nowhere = local_name(site) == MID and site in inputs
        if layer_of(site) in (None, middle) and not nowhere and local_name(site) not in NOT_EDITED:
            yield make.at_site(site)


def _by_name(sides: EditedSides, make: Changes, hook: Hook) -> Change | NotTested:
    instead = sides.named.says.get(hook.name)
    found = f"it shows {instead}" if instead else make.at_hook(hook)
    return _skipped(hook.name, found) if isinstance(found, str) else found


def _skipped(name: str, why: str) -> NotTested:
    return NotTested(what=f"editing {name}", why=why)


class _Runs:
    """Logits of the real tokens `[token d_vocab]` of the candidate, the reference and the judge, edited and not."""

    def __init__(self, sides: EditedSides, probe: Probe) -> None:
        self.sides, self.probe = sides, probe
        plan, version = sides.candidate.plan, sides.candidate.description().release
        by_name = hooks(plan.spec, plan.backend_key, plan.config, version)
        self.by_name = {hook.name: hook.tap for hook in by_name}
        self.candidate = self._run(sides.candidate, {}, NATIVE)
        self.judge = self._run(sides.judging, {}, FLOAT64)
        self.rounding = _rms(self._run(sides.judging, {}, NATIVE) - self.judge)

    def outcome(self, change: Change) -> Outcome:
        """What one edit does."""
        made = self._run(self.sides.candidate, change.candidate, NATIVE)
        reference = self._run(self.sides.judging, change.judging, NATIVE)
        judge = self._run(self.sides.judging, change.judging, FLOAT64)
        effect, own_effect = _rms(judge - self.judge), _rms(made - self.candidate)
        # The reference's edit may replace what carries its rounding: a norm's output, where the candidate's edits its scale.
        floor = max(_rms(reference - judge), self.rounding)
        if effect <= FLOORS_TO_MOVE * floor:
            return _skipped(change.name, "the edit moves nothing in the reference")
        rounding = limit_of(LOGITS) * floor
        ratio = noise_ratio(_rms(made - judge), floor, _rms(judge), self.sides.dtype)
        if own_effect <= rounding:
            says = NO_EFFECT
        elif not self.sides.agrees:
            return _skipped(change.name, DROWNED)
        elif ratio <= limit_of(LOGITS):
            says = ""
        else:
            says = self._says(change, made, judge, rounding)
        if says and any(self._guessed(site) for site in change.candidate):
            return _skipped(change.name, GUESSED)
        return HookEdit(
            site=change.name, same=not says, noise_ratio=ratio, reference_effect=effect, candidate_effect=own_effect,
            says=says,
        )  # fmt: skip

    def _guessed(self, site: str) -> bool:
        """Whether the candidate's tensor stands where attention is written as in the reference, and may be something else."""
        shown = self.sides.shown
        return site in shown.sites(self.probe.name) and bool(shown.assumes(self.probe.name, site))

    def _says(self, change: Change, made: Tensor, judge: Tensor, rounding: float) -> str:
        """What an edit does instead."""
        if change.norm_only:
            lost = self._run(self.sides.judging, change.norm_only, FLOAT64)
            if _rms(lost - made) <= rounding:
                return "the edit reaches the norm after it, and not the residual stream"
        moved, meant = made - self.candidate, judge - self.judge
        cosine = float((moved * meant).sum() / (moved.norm() * meant.norm()).clamp_min(TINY))
        size = _rms(moved) / _rms(meant)
        return f"the logits move {size:.3g} times as far as they should, in a direction with cosine {cosine:.3g} to the right one"

    def _run(self, session: Session, replaced: Mapping[str, Tensor], precision: str) -> Tensor:
        """The logits, in float64."""
        inputs = {}
        self.sides.out.mkdir(parents=True, exist_ok=True)
        for name, value in replaced.items():
            path = self.sides.out / f"{name}.safetensors"
            save_file({"x": value.float().contiguous()}, path)
            inputs[name] = str(path)
        request = RunRequest(
            probe=self.probe, taps=tuple(self._taps(session, replaced)), out=str(self.sides.out / "run"),
            precision=precision, inputs=inputs,
        )  # fmt: skip
        reply = session.replay(request) if replaced else session.run(request)
        entry = next(entry for entry in reply.entries if entry.site == LOGITS)
        return f64(load_file(self.sides.out / "run" / entry.file)["x"][real(self.probe)])

    def _taps(self, session: Session, replaced: Mapping[str, Tensor]) -> Sequence[SiteTap]:
        """The logits, and what is replaced: a hook by its name, a site where the spec says."""
        every = _taps(session)
        named = [self.by_name[name] for name in replaced if name in self.by_name]
        return [*(tap for tap in every if tap.site == LOGITS or tap.site in replaced), *named]


def _taps(session: Session) -> tuple[SiteTap, ...]:
    """Where the spec says that the sites of this session's release are."""
    plan = session.plan
    return taps(plan.spec, plan.backend_key, plan.config, session.description().release)


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
