"""Compute the error that each component introduces, by running the judge on each side's own inputs.

A tensor whose meaning rests on an assumption about the candidate's code (`SiteTap.assumes`: rotated queries, scores,
pattern) is given to the judge like any other. If the assumption is false, the judge is misled: given queries that were
already multiplied by the scale, it multiplies them again, and every later site seems wrong. So if such a tensor seems
wrong, the judge runs again without any of them, from the inputs of the attention to its output. If the judge then
arrives at the candidate's own result in a block, the attention of that block is right, whatever these tensors show, and
they are left out there. In a narrow dtype a different attention may arrive at that result too, so there the tensors
themselves are checked as well (see `compare.attending`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from parity_audit.capture.session import Session
from parity_audit.capture.store import Capture, with_newer
from parity_audit.capture.take import take_capture, wanted
from parity_audit.compare.attending import attends_otherwise
from parity_audit.compare.choices import Pair, Route
from parity_audit.core.limits import limit_of
from parity_audit.core.manifest import Entry
from parity_audit.core.sites import layer_of, local_name
from parity_audit.core.types import Probe, SiteTap
from parity_audit.core.wire import FLOAT64
from parity_audit.diagnose.localise import introduced_ratios
from parity_audit.diagnose.routing import choices_of_replay
from parity_audit.formulas.rounding import NARROW

BEHIND_ATTENTION = ("z", "z_gated", "attn_proj", "attn_out", "resid_mid", "resid_post")
"""Sites that show the result of attention, the nearest first."""

Choose = Callable[[SiteTap, Probe], bool]
Ratios = dict[tuple[str, str], float]
Replays = dict[tuple[object, ...], Capture]
"""Replays, by the judge and what was given to it: a capture, its tensors, and the probes."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The captures of the same probes on every side.

    `definition` is given if the reference does not compute the same function as the definition.
    """

    candidate: Capture
    reference: Capture
    definition: Capture | None

    def alike(self) -> Sides:
        """Leave out tensors of the candidate that rest on an assumption and cannot be compared with the reference's.

        They cannot be compared if the reference's tensor has another shape, or if the reference shows that site in no
        layer.
        """
        shown = {(probe, local_name(site)) for probe, site in self.reference.entries}

        def usable(entry: Entry) -> bool:
            if not entry.assumes:
                return True
            expected = self.reference.entries.get((entry.probe, entry.site))
            return (entry.probe, local_name(entry.site)) in shown if expected is None else expected.shape == entry.shape

        return replace(self, candidate=self.candidate.where(usable))

    def without(self, sites: frozenset[str]) -> Sides:
        """The captures of all sides without these sites."""
        definition = None if self.definition is None else self.definition.without(sites)
        return Sides(
            candidate=self.candidate.without(sites), reference=self.reference.without(sites), definition=definition
        )


@dataclass(frozen=True, kw_only=True)
class Judging:
    """The judge that replays in float64, the folder for replays, and the replays already `made` for the same judge.

    `route` computes the weights of the experts from the routers' logits. It is None if the model has no routers, or in
    a dtype in which rounding decides too many of their choices.
    """

    judge: Session
    dtype: str
    out: Path
    made: Replays = field(default_factory=dict)
    route: Route | None = None


@dataclass(frozen=True, kw_only=True)
class Introduced:
    """The introduced ratio of every (probe, site), the judge's replay on the candidate's own inputs, and the sides
    without the tensors that were left out."""

    ratios: Ratios
    replayed: Capture
    sides: Sides


def introduced(
    judging: Judging, probes: Sequence[Probe], sides: Sides, name: str, choose: Choose = wanted
) -> Introduced:
    """Compute the error that every component introduces on these probes."""
    sides = sides.alike()
    ratios, replayed = _replay(judging, probes, sides, name, choose)
    doubtful = _doubtful(sides.candidate, ratios)
    if not doubtful:
        return Introduced(ratios=ratios, replayed=replayed, sides=sides)
    assumed = _assumed(sides.candidate)
    whole, judged = _replay(judging, probes, sides.without(assumed), f"{name}-whole", choose)
    right = {
        layer
        for layer in doubtful
        if _attention_is_right(whole, layer)
        and not (judging.dtype in NARROW and attends_otherwise(sides.candidate, judged, layer, judging.dtype))
    }
    left_out = frozenset(site for site in assumed if layer_of(site) in right)
    kept = {place: ratio for place, ratio in ratios.items() if layer_of(place[1]) not in right}
    kept |= {place: ratio for place, ratio in whole.items() if layer_of(place[1]) in right}
    candidate = sides.candidate.without(left_out)
    return Introduced(ratios=kept, replayed=replayed, sides=replace(sides, candidate=candidate))


def _replay(judging: Judging, probes: Sequence[Probe], own: Sides, name: str, choose: Choose) -> tuple[Ratios, Capture]:
    """The introduced ratios from the judge's replays on each side's own inputs, and the replay of the candidate.

    If a definition is given because the reference departs from it, the reference's ratios are computed as well, and the
    larger ratio of the two sides counts.
    """

    def forced(side: str, capture: Capture, rounding: Pair[Capture] | None = None) -> Capture:
        given = (judging.judge.label, capture.folder, frozenset(capture.entries), *(probe.name for probe in probes))
        if given not in judging.made:
            out = judging.out / f"{name}-{side}"
            replay = partial(take_capture, judging.judge, precision=FLOAT64, forced_by=capture, choose=choose)
            made = replay(probes, out)
            choices = choices_of_replay(
                capture, made, rounding, probes, judging.route, out.with_name(f"{out.name}-choices"),
                judging.dtype,
            )  # fmt: skip
            if choices:
                own = [probe for probe in probes if probe.name in choices]
                again = replay(own, out.with_name(f"{out.name}-again"), imposed=choices)
                made = with_newer(made, again, out.with_name(f"{out.name}-followed"))
            judging.made[given] = made
        return judging.made[given]

    floor = own.definition or own.reference
    truth = forced("floor", floor)
    rounding = Pair(judge=truth, floor=floor)
    replay = forced("candidate", own.candidate, rounding)
    ratios = introduced_ratios(own.candidate, replay, floor, truth, dtype=judging.dtype)
    if own.definition is not None:
        replayed = forced("reference", own.reference, rounding)
        for place, ratio in introduced_ratios(own.reference, replayed, floor, truth, dtype=judging.dtype).items():
            ratios[place] = max(ratio, ratios.get(place, 0.0))
    return ratios, replay


def _assumed(capture: Capture) -> frozenset[str]:
    return frozenset(entry.site for entry in capture.manifest.entries if entry.assumes)


def _doubtful(capture: Capture, ratios: Mapping[tuple[str, str], float]) -> set[int | None]:
    """The blocks in which a tensor that rests on an assumption seems wrong."""
    assumed = _assumed(capture)
    return {layer_of(site) for (_, site), ratio in ratios.items() if site in assumed and ratio > limit_of(site)}


def _attention_is_right(whole: Mapping[tuple[str, str], float], layer: int | None) -> bool:
    """Whether the nearest visible result of a block's attention agrees with the judge's on the block's own inputs."""
    for name in BEHIND_ATTENTION:
        site = f"blocks.{layer}.{name}"
        seen = [ratio for (_, other), ratio in whole.items() if other == site]
        if seen:
            return max(seen) <= limit_of(site)
    return False
