"""Check whether editing a hook has the effect that the same edit has in the reference.

Even if the forward passes are bit-identical, an edit can be lost: the hook may show a copy, or feed only one of the two places
that use a tensor. So one hook at a time, in one middle block, is given the same edited tensor on every side (see
`checks.changes`). The logits of the edited runs are compared as usual: RMSE(candidate, judge) over the noise floor
RMSE(reference, judge), which is at least the floor without an edit. TransformerLens' hooks are edited by name, as their users
do; a site without a named hook is edited at its module.

If the candidate has a mismatch that no patch repairs, its own error is part of every number; then the only defect that is
reported is an edit without any effect.
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
"""An edit is judged only if it moves the judge's logits by more than this many noise floors."""
READ_ONLY = ("vllm",)
NO_EFFECT = "the edit has no effect: the hook shows a tensor that nothing reads"
GUESSED = "not as in the reference; but where this tensor is read was guessed, and the port may compute attention in another way"
DROWNED = "it moves the logits; whether as it should is hidden by this port's own error"


@dataclass(frozen=True, kw_only=True)
class EditedSides:
    """The sessions that are edited: the candidate, and the judging session natively (for the floor) and in float64.

    `judge` and `shown` are the captures of the judge and of the candidate. `agrees`: whether the candidate, as it is now,
    computes the reference's function.
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
    """Edit every hook and site that both sides show, in one middle block and outside the blocks.

    Returns the outcome of each edit, and the edits that could not be judged with the reason.

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
    """Yield the edits of one middle block and outside the blocks: by hook name where TransformerLens has one, else by site."""
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
        # If `resid_mid` is read at the norm's input, an edit there reaches only the norm and never the residual stream.
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
    """Runs the candidate, the reference and the judge with and without edits, for the real tokens' logits `[token d_vocab]`."""

    def __init__(self, sides: EditedSides, probe: Probe) -> None:
        self.sides, self.probe = sides, probe
        plan, version = sides.candidate.plan, sides.candidate.description().release
        by_name = hooks(plan.spec, plan.backend_key, plan.config, version)
        self.by_name = {hook.name: hook.tap for hook in by_name}
        self.candidate = self._run(sides.candidate, {}, NATIVE)
        self.judge = self._run(sides.judging, {}, FLOAT64)
        self.rounding = _rms(self._run(sides.judging, {}, NATIVE) - self.judge)

    def outcome(self, change: Change) -> Outcome:
        """Return whether one edit has the right effect in the candidate, or why that could not be judged."""
        made = self._run(self.sides.candidate, change.candidate, NATIVE)
        reference = self._run(self.sides.judging, change.judging, NATIVE)
        judge = self._run(self.sides.judging, change.judging, FLOAT64)
        effect, own_effect = _rms(judge - self.judge), _rms(made - self.candidate)
        # The judging side's edit may replace the very tensor that carries its rounding (a norm's output, where the candidate
        # edits the norm's scale), so the floor is at least that of the runs without an edit.
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
        """Whether the candidate's tensor at this site was located by assuming that attention is computed as in the reference."""
        shown = self.sides.shown
        return site in shown.sites(self.probe.name) and bool(shown.assumes(self.probe.name, site))

    def _says(self, change: Change, made: Tensor, judge: Tensor, rounding: float) -> str:
        """Describe the effect of an edit that does not move the logits as it should."""
        if change.norm_only:
            lost = self._run(self.sides.judging, change.norm_only, FLOAT64)
            if _rms(lost - made) <= rounding:
                return "the edit reaches the norm after it, and not the residual stream"
        moved, meant = made - self.candidate, judge - self.judge
        cosine = float((moved * meant).sum() / (moved.norm() * meant.norm()).clamp_min(TINY))
        size = _rms(moved) / _rms(meant)
        return f"the logits move {size:.3g} times as far as they should, in a direction with cosine {cosine:.3g} to the right one"

    def _run(self, session: Session, replaced: Mapping[str, Tensor], precision: str) -> Tensor:
        """Run the probe with some tensors replaced and return the logits of its real tokens in float64."""
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
        """Return the taps of the logits and of all replaced tensors: hooks by name, sites where the spec locates them."""
        every = _taps(session)
        named = [self.by_name[name] for name in replaced if name in self.by_name]
        return [*(tap for tap in every if tap.site == LOGITS or tap.site in replaced), *named]


def _taps(session: Session) -> tuple[SiteTap, ...]:
    """Return the taps of all sites, as the spec locates them in the release that this session runs."""
    plan = session.plan
    return taps(plan.spec, plan.backend_key, plan.config, session.description().release)


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
