"""Check whether every hook of TransformerLens shows the tensor that its name promises.

A hook is right if its distance to the judge is within the limit that applies to every site. If it is not, but the hook shows
what the port itself computes at that site, the hook only inherits the port's error and is not accused. A hook that shows any
other tensor is wrong, whatever the port computes. If the port's outputs agree with the judge, there is no error to inherit:
then a hook is also wrong if it is far from the judge and the spec knows no other place that shows the site. Attention scores
may differ by a constant per query, because softmax removes it: ALiBi can be counted from the query or from the first key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture
from parity_audit.checks.limits import chosen_probe
from parity_audit.checks.promised import ExpectedTensors
from parity_audit.checks.reading import Reading, Values, read_hooks
from parity_audit.compare.deltas import compare
from parity_audit.compare.floor import dtype_eps
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import TINY, ratio_of, share_of_limit
from parity_audit.core.report import Finding, SiteDelta
from parity_audit.core.sites import layer_of, local_name
from parity_audit.core.types import NotTested, Probe
from parity_audit.diagnose.confidence import BY_COMPARISON
from parity_audit.diagnose.evidence import f64, real, relative_rms
from parity_audit.diagnose.thresholds import MANY_ROUNDINGS, SAME_VALUE
from parity_audit.specs.hook_names import ADDED_RESULT, NORMALIZED, RESULT, SCALE, VALUE, Hook, hooks

KIND = "hook"
WHAT = "hooks by name"
SCORES = "attn_scores"
WRONG_RELATIVE = 0.01
"""Relative RMS above which a hook is far off: such an error, if it reached the outputs, would be thousands of noise floors."""
MEANS = {
    "attn_out": "what attention adds to the residual stream",
    "mlp_out": "what the MLP adds to the residual stream",
    SCALE: "the root mean square that the norm divides by",
    NORMALIZED: "the norm's input over its scale",
    RESULT: "what each head adds to attention's output",
    ADDED_RESULT: "what each head adds to the residual stream",
}


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The candidate whose hooks are read, and the captures from which the promised values are computed.

    `shown` is the candidate's own capture. `definition` is the judge's native run, given if the reference departs from it
    (see `compare.deltas.compare`).
    """

    candidate: Session
    shown: Capture
    reference: Capture
    judge: Capture
    definition: Capture | None
    dtype: str
    out: Path


@dataclass(frozen=True, kw_only=True)
class NamedHook:
    """One hook compared with what its name promises; `delta` has the hook's name as its site.

    `own`: whether the hook shows what this port itself computes at that site; None if the port's capture cannot tell.
    """

    hook: Hook
    delta: SiteDelta
    own: bool | None

    @property
    def right(self) -> bool:
        """Whether the hook's value is within the limit around the judge's value."""
        return share_of_limit(self.delta) <= 1.0

    @property
    def wrong(self) -> bool:
        """Whether the hook promises a site's value but shows neither the judge's value nor the one this port computes there."""
        return not self.right and self.hook.promises == VALUE and self.own is False

    @property
    def far(self) -> bool:
        """Whether the hook's distance to the judge is too large to be rounding."""
        return not self.right and self.delta.rel > WRONG_RELATIVE


@dataclass(frozen=True, kw_only=True)
class NamedHooks:
    """Every hook that could be read; `says` describes, by hook name, what each hook that is not right shows instead."""

    hooks: tuple[NamedHook, ...]
    says: dict[str, str]
    not_tested: tuple[NotTested, ...]


@one_thread()
def named_hooks(sides: Sides) -> NamedHooks:
    """Read every hook of the candidate under its own name and compare it with what the name promises.

    Raises:
        NotJudged: the backend failed.
    """
    plan, about = sides.candidate.plan, sides.candidate.description()
    every = hooks(plan.spec, plan.backend_key, plan.config, about.release)
    if not every:
        return NamedHooks(hooks=(), says={}, not_tested=())
    probe = chosen_probe(sides.judge.probes)
    reading = read_hooks(sides.candidate, every, probe, sides.out)
    bench = _HookComparer(sides, probe, reading)
    found: list[NamedHook] = []
    gaps: list[NotTested] = []
    for name in dict.fromkeys(hook.name for hook in every):
        options = [hook for hook in every if hook.name == name]
        seen = bench.best(options)
        if isinstance(seen, NamedHook):
            found.append(seen)
        elif seen:
            gaps.append(NotTested(what=name, why=seen))
    says = {item.hook.name: bench.says(item) for item in found if not item.right}
    return NamedHooks(hooks=tuple(found), says=says, not_tested=tuple(gaps))


class _HookComparer:
    """Compares what each hook shows with what it should show, one hook at a time."""

    def __init__(self, sides: Sides, probe: Probe, reading: Reading) -> None:
        plan = sides.candidate.plan
        self.sides, self.probe, self.reading = sides, probe, reading
        self.own, self.reference, self.judge, self.definition = (
            None if capture is None else ExpectedTensors(capture, probe, plan)
            for capture in (sides.shown, sides.reference, sides.judge, sides.definition)
        )

    def best(self, options: Sequence[Hook]) -> NamedHook | str:
        """Return the comparison with the promise that fits the hook best, else the reason why it could not be compared.

        The reason is empty if nobody could expect the hook to be readable.
        """
        name = options[0].name
        if name not in self.reading.values.made:
            return self.reading.hidden.get(name, "") if any(self._expected(hook) for hook in options) else ""
        made = [self._against(hook) for hook in options]
        judged = [item for item in made if isinstance(item, NamedHook)]
        if judged:
            return min(judged, key=lambda item: share_of_limit(item.delta))
        return next((item for item in made if isinstance(item, str) and item), "")

    def _against(self, hook: Hook) -> NamedHook | str:
        sources = [self._promise(side, hook) for side in (self.reference, self.judge, self.definition)]
        reference, judge, definition = sources
        if reference is None or judge is None:
            return "no other side shows what it follows from"
        shown = Values(self.probe, {hook.name: lambda: self.reading.values.tensor(hook.name)})
        have, want = shown.shape(self.probe.name, hook.name), judge.shape(self.probe.name, hook.name)
        if have != want:
            return f"it holds {list(have)} here, where its name says {list(want)}"
        delta = self._distance(shown, reference, judge, definition)
        if delta is None:
            return "no finite entry at a real position"
        if hook.promises == VALUE and local_name(hook.site) == SCORES and share_of_limit(delta) > 1.0:
            moved = (from_own_key(shown), from_own_key(reference), from_own_key(judge))
            shifted = self._distance(*moved, None if definition is None else from_own_key(definition))
            delta = delta if shifted is None or share_of_limit(shifted) > 1.0 else shifted
        own = self._promise(self.own, hook)
        same = None if own is None else self._same(shown.tensor(hook.name), own.tensor(hook.name))
        return NamedHook(hook=hook, delta=delta, own=same)

    def _distance(
        self, shown: Values, reference: Values, judge: Values, definition: Values | None
    ) -> SiteDelta | None:  # fmt: skip
        found = compare(shown, reference, judge, dtype=self.sides.dtype, definition=definition)
        return found.by_probe[0] if found.by_probe else None

    def _expected(self, hook: Hook) -> bool:
        """Whether this port's capture has the site (so the hook should exist) and the judge can compute the promised value."""
        shown = hook.site in self.sides.shown.sites(self.probe.name)
        return shown and self._promise(self.judge, hook) is not None

    def _promise(self, side: ExpectedTensors | None, hook: Hook) -> Values | None:
        make = None if side is None else side.of(hook)
        return None if make is None else Values(self.probe, {hook.name: make})

    def _same(self, shown: Tensor, other: Tensor) -> bool:
        if shown.shape != other.shape:
            return False
        ours, theirs = self._real(shown), self._real(other)
        return relative_rms(ours - theirs, theirs) <= rounding(self.sides.dtype)

    def _real(self, value: Tensor) -> Tensor:
        """Return the entries of real (unpadded) tokens as a flat float64 tensor; masked scores (-inf) count as 0."""
        kept = value if value.shape[:2] != self.probe.shape else value[real(self.probe)]
        return f64(kept).nan_to_num(neginf=0.0).flatten()

    def says(self, item: NamedHook) -> str:
        """Describe what a wrong hook shows: the nearest other site of this port, a multiple of that site, or "something else"."""
        value = self.reading.values.tensor(item.hook.name)
        sites = self._nearby(item, value)
        others = ((site, self._real(self.sides.shown.tensor(self.probe.name, site))) for site in sites)
        found = nearest(self._real(value), others, within=rounding(self.sides.dtype))
        return found or f"something else ({item.delta.rel:.2g} of its size away)"

    def _nearby(self, item: NamedHook, value: Tensor) -> Iterable[str]:
        """Return the sites of the same block and shape to compare the hook with, the hook's own site first.

        The own site is left out if the hook shows exactly what the port computes there.
        """
        layer = layer_of(item.hook.name)
        own = item.hook.site if item.own else None
        near = [site for site in self.sides.shown.sites(self.probe.name) if layer_of(site) == layer and site != own]
        shaped = [s for s in near if self.sides.shown.shape(self.probe.name, s) == tuple(value.shape)]
        return sorted(shaped, key=lambda site: (site != item.hook.site, site))


def rounding(dtype: str) -> float:
    """Return the largest relative RMS that rounding alone may leave between two computations of one tensor.

    It is capped at `WRONG_RELATIVE`, because 64 roundings of bfloat16 would be half of the tensor's size.
    """
    return min(MANY_ROUNDINGS * dtype_eps(dtype), WRONG_RELATIVE)


def nearest(shown: Tensor, sites: Iterable[tuple[str, Tensor]], *, within: float) -> str:
    """Return the site, or multiple of a site, nearest to a hook's entries `[n]`; empty if none is closer than `within`.

    `within` is the relative RMS of the difference.
    """
    words = ""
    for site, value in sites:
        times = float(shown @ value / (value @ value).clamp_min(TINY))
        distance = relative_rms(shown - times * value, shown)
        if distance < within:
            within, name = distance, local_name(site)
            words = name if abs(times - 1.0) <= SAME_VALUE else f"{times:.4g} times {name}"
    return words


def from_own_key(scores: Values) -> Values:
    """Return scores `[batch head query key]` minus each query's score with its own key, which every causal mask allows."""
    return Values(scores.probe, {name: partial(_from_own_key, make) for name, make in scores.made.items()})


def _from_own_key(make: Callable[[], Tensor]) -> Tensor:
    scores = make()
    return scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]


def sites_of_wrong_hooks(named: NamedHooks) -> set[str]:
    """Return the sites whose hook shows what the port's capture has there, although that value is far from the judge's.

    If the outputs agree, the captured value is wrong because the hook is, and the computation is right.
    """
    return {item.hook.site for item in named.hooks if item.own and item.far and item.hook.promises == VALUE}


def findings(named: NamedHooks, *, outputs_agree: bool) -> tuple[Finding, ...]:
    """Return one finding per wrong hook, which covers all blocks where that hook shows the same other tensor.

    If the outputs are wrong, a hook is reported only if it shows something other than what this port computes.
    """
    groups: dict[tuple[str, str], list[NamedHook]] = {}
    for item in named.hooks:
        if item.wrong or (outputs_agree and item.far):
            instead = named.says[item.hook.name]
            groups.setdefault((local_name(item.hook.name), instead), []).append(item)
    return tuple(_finding(local, instead, items) for (local, instead), items in groups.items())


def _finding(local: str, instead: str, items: Sequence[NamedHook]) -> Finding:
    hook = items[0].hook
    site = local_name(hook.site)
    means = MEANS.get(site if hook.promises == VALUE else hook.promises, f"the value of {site}")
    layers = tuple(layer for item in items if (layer := layer_of(item.hook.name)) is not None)
    worst = max(items, key=lambda item: ratio_of(item.delta))
    return Finding(
        knob=local, kind=KIND, layers=layers or None, site=hook.name, reference_value=site, candidate_value=instead,
        evidence={"times the floor": ratio_of(worst.delta), "relative": worst.delta.rel, "promises": hook.promises},
        confidence=BY_COMPARISON, departs_from_spec="candidate",
        message=f"{local} shows {instead}, where its name says {means}",
    )  # fmt: skip
