"""Find the knob values that explain how one side computes its components from its own inputs, site by site.

    residual = rms(formula(captured inputs) - captured) / rms(captured)

Under the spec's values, a right component leaves rounding. Where the residual is more, `explain` searches for one knob, or for two
or three that are wrong together, whose values leave rounding. An explanation must also hold at the layer's other visible sites that
ask for its knobs. Both sides are treated alike, so a reference that departs from the spec is found the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity_audit.compare.floor import dtype_eps
from parity_audit.core.limits import limit_of
from parity_audit.core.sites import ROTATED, layer_of, local_name, site_order
from parity_audit.core.types import NotTested
from parity_audit.diagnose.attempt import attempt
from parity_audit.diagnose.evidence import EXPLAINED_BY, FORMULA, KnobFit
from parity_audit.diagnose.fit.explain import explanations
from parity_audit.diagnose.fit.pictures import picture
from parity_audit.diagnose.fit.residuals import OF_EACH_TOKEN, Component, Values
from parity_audit.diagnose.fit.search import SAME_WITHIN, uncertainty
from parity_audit.diagnose.fit.settings import Explanation, Setting
from parity_audit.diagnose.fit.sides import ByLayer, Side, as_shown_by, side_of, sites_with_formula
from parity_audit.diagnose.fit.site_residual import (
    MORE_ON_ALL,
    OF_A_BLOCK,
    combined_difference,
    difference_of,
    explains,
    knobs_asked,
    most_left,
    residual,
    values_with_setting,
    with_residual,
    without_rounding,
)
from parity_audit.diagnose.localise import component_of
from parity_audit.diagnose.thresholds import CLEARLY_MORE, MANY_ROUNDINGS, TIED
from parity_audit.formulas.knob import CHOICE, REAL, ROUNDING
from parity_audit.formulas.knobs import KNOBS

ROUNDED_ONCE = 12**-0.5
"""The root mean square of one rounding, in steps of the dtype: its error is uniform between half a step down and half a step up."""
OF_NORMS = "norm."
OWN_AT_EACH_SITE = (OF_NORMS, "qk_norm.", "residual.scale", "residual.stream", "mlp.activation")
"""Prefixes of knobs of components that a block has several of: one of them may be wrong and the others right."""
TABLE = "rope.table_dtype"
ORDER_OF_A_BLOCK = ("norm.order", "residual.parallel", "attention.scaled")
"""Knobs for the order in which the components of a block work: a right order leaves rounding at all components that it changes."""


@dataclass(kw_only=True)
class Causes:
    """The fits of both sides, for every knob that departs on either, and the sites whose analysis failed."""

    candidate: list[KnobFit] = field(default_factory=list)
    reference: list[KnobFit] = field(default_factory=list)
    gaps: list[NotTested] = field(default_factory=list)

    def attempt(self, what: str, step: Callable[[], None]) -> None:
        """Run a step; if it fails, record a gap."""
        broken = attempt(what, step)
        self.gaps += [] if broken is None else [broken]


def causes(
    candidate: ByLayer, reference: ByLayer, suspects: Collection[str] | None, known: Sequence[Setting] = ()
) -> Causes:
    """Return the fits that explain the suspect components (None: all), and the fits of the same knobs at sites that are right.
    Values in `known`, found elsewhere for the candidate, are tried first. If one side is given as both, it is searched once."""
    found = Causes()
    if candidate is not reference:
        candidate, reference = as_shown_by(candidate, reference), as_shown_by(reference, candidate)
    sides = _sides(candidate, reference, known)
    for site in sites_with_formula(candidate):
        if suspects is None or component_of(site) in suspects:
            found.attempt(f"causes by formula at {site}", partial(_explain, site, sides, found))
    for knob in sorted({fit.knob for fit in found.candidate}):
        seen = {(fit.layer, fit.site) for fit in found.candidate if fit.knob == knob}
        for site in sites_with_formula(candidate):
            if (layer_of(site), local_name(site)) not in seen:
                found.attempt(f"{knob} at {site}", partial(_add_where_right, site, knob, sides, found))
    return found


def departing(
    sites: Collection[str], candidate: ByLayer, reference: ByLayer, known: Sequence[Setting] = ()
) -> list[str]:
    """Return the sites that cannot be compared, or at which, on some side, neither the spec's values nor (on the candidate only)
    those in `known` leave rounding."""
    sides = _sides(candidate, reference, known) if sites else ()
    both = {site: _both(site, sides) for site in sites}
    return [
        site for site, parts in both.items()
        if not parts or not all(one.is_right or _known(one, _asked_for(one)) is not None for one in parts)
    ]  # fmt: skip


@dataclass(kw_only=True)
class Searched:
    """One side, the explanations found for it so far, and the sites of blocks that no knob explained."""

    side: Side
    found: list[Explanation] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


def _sides(candidate: ByLayer, reference: ByLayer, known: Sequence[Setting]) -> tuple[Searched, Searched]:
    before = [Explanation(values=setting, residual=math.nan) for setting in known]
    searched = Searched(side=side_of(candidate), found=before)
    return searched, searched if candidate is reference else Searched(side=side_of(reference))


@dataclass(frozen=True, kw_only=True)
class _AtSite:
    """One site on one side: its components, the residual of the spec's values over all probes (`residual`) and in the worst
    probe (`most`), and the residuals that rounding (`limit`) and an explanation (`enough`) may leave."""

    searched: Searched
    parts: Sequence[Component]
    residual: float
    most: float
    limit: float
    enough: float

    @property
    def is_right(self) -> bool:
        """Whether the spec's values leave rounding. The limit of a rotation is that of an explanation: it is a sum of two
        products with few roundings. Elsewhere it is wider, since scores in a narrow dtype may move the averages that they weigh
        by many roundings."""
        few = local_name(self.parts[0].site) in OF_EACH_TOKEN
        return self.most <= (self.enough if few else self.limit)


def _both(site: str, sides: Sequence[Searched]) -> list[_AtSite]:
    """Return a site on both sides; empty if a side does not show it or its formula cannot be computed there."""
    parts = [one.side.shown(site) for one in sides]
    if not all(parts) or any(side.side.residuals.made(own[0]) is None for side, own in zip(sides, parts, strict=True)):
        return []
    left = [residual(one.side.residuals, own) for one, own in zip(sides, parts, strict=True)]
    left[1] = max(left[1], _left_where_turned(site, sides[1].side))
    step = max(one.side.eps(own[0]) for one, own in zip(sides, parts, strict=True))
    steps = MANY_ROUNDINGS * step
    # If the reference does not round at all (a lookup of rows), the candidate may still round once.
    floor = max(left[1], step * ROUNDED_ONCE) if left[1] <= steps else steps / limit_of(site)
    # float32 and float64 have digits to spare: a value that leaves many roundings still determines a constant to five digits, and
    # may be the only explanation. In bfloat16, a limit that wide would accept any value.
    enough = limit_of(site) if step <= dtype_eps("float32") else CLEARLY_MORE
    return [
        _AtSite(
            searched=one, parts=own, residual=off, most=most_left(one.side.residuals, own),
            limit=limit_of(site) * floor, enough=enough * floor,
        )
        for one, own, off in zip(sides, parts, left, strict=True)
    ]  # fmt: skip


def _left_where_turned(site: str, reference: Side) -> float:
    """Return the reference's residual at a rotation in another layer, if its own layer rotates nothing: queries and keys that
    are passed on unrotated show none of the rounding that a rotation has. 0 at all other sites."""
    if local_name(site) not in ROTATED or _base(reference, layer_of(site)) is not None:
        return 0.0
    turning = (layer for layer in reference.evidence if layer is not None and _base(reference, layer) is not None)
    parts = next((found for layer in turning if (found := reference.shown(f"blocks.{layer}.{local_name(site)}"))), [])
    return residual(reference.residuals, parts) if parts else 0.0


def _base(side: Side, layer: int | None) -> Any:
    return side.residuals.decoder.knob("rope.theta", layer)


def _explain(site: str, sides: Sequence[Searched], found: Causes) -> None:
    """Explain one site on both sides, and append the fits of every knob that departs on either."""
    both = _both(site, sides)
    if all(one.is_right for one in both):
        return
    told = [None if one.is_right else _explanation(one) for one in both]
    if any(one is None and not at.is_right for one, at in zip(told, both, strict=True)):
        return
    turned = _base(sides[1].side, both[0].parts[0].layer) is not None
    for knob in dict.fromkeys(knob for one in told if one is not None for knob in one.values):
        if knob == TABLE and not turned:
            continue  # the reference rotates nothing here, so no table can be wrong
        for one, explanation, out in zip(both, told, (found.candidate, found.reference), strict=True):
            out.append(_fit(one, knob, explanation))


def _add_where_right(site: str, knob: str, sides: Sequence[Searched], found: Causes) -> None:
    """Append the fits of a knob at a site that asks for it and is right on both sides."""
    parts = sides[0].side.shown(site)
    if not parts or knob not in knobs_asked(sides[0].side.residuals, parts[0]):
        return
    both = _both(site, sides)
    if both and all(one.is_right for one in both):
        for one, out in zip(both, (found.candidate, found.reference), strict=True):
            out.append(_fit(one, knob, None))


def _explanation(at: _AtSite) -> Explanation | None:
    """Return an explanation found before if it holds here, else the first one of a search that holds, else None."""
    knobs = _asked_for(at)
    known = _known(at, knobs)
    if known is not None:
        return known
    if local_name(at.parts[0].site) in at.searched.failed:
        return None  # the search failed at this site in another layer
    # If this block may run twice, its second run repeats every error of the first: try all values found before.
    tried = _tried(at, _found_before(at, frozenset(KNOBS) if OF_A_BLOCK in knobs else knobs))
    chosen = next((one for one in tried if _holds(at, one)), None)
    if chosen is None:
        at.searched.failed.add(local_name(at.parts[0].site))
        return None
    as_well = [
        one for one in tried if one.values.keys() == chosen.values.keys() and one.residual <= TIED * chosen.residual
    ]
    others = (
        one for one in as_well if one is not chosen and _holds(at, one) and not _is_worse_elsewhere(at, one, chosen)
    )
    chosen = replace(chosen, tied=tuple(one.values for one in others))
    at.searched.found.append(chosen)
    return chosen


def _asked_for(at: _AtSite, setting: Setting | None = None) -> frozenset[str]:
    """Return the knobs that a site's formulas ask for in any probe, under the spec's values or a setting: a long text captures
    fewer sites than a short one, and so asks for the knobs of those too."""
    return frozenset().union(*(knobs_asked(at.searched.side.residuals, part, setting) for part in at.parts))


def _as_read(at: _AtSite, setting: Setting, knobs: frozenset[str]) -> Setting:
    """Return the part of a setting that a site's formula reads; `knobs` are those that it asks for. A layer without rotation
    asks for a scaling of frequencies only if a base is set too, and its keys for no temperature."""
    if knobs.isdisjoint(setting):
        return {}
    read = knobs if knobs.issuperset(setting) else _asked_for(at, setting)
    return {knob: value for knob, value in setting.items() if knob in read}


def _known(at: _AtSite, knobs: frozenset[str]) -> Explanation | None:
    """Return the part of an explanation found before that holds here too, else None."""
    read = (replace(one, values=_as_read(at, one.values, knobs)) for one in at.searched.found)
    return next((one for one in read if one.values and _holds(at, one)), None)


def _found_before(at: _AtSite, knobs: frozenset[str]) -> Setting:
    """Return the values found at other sites that this site's formula asks for and that do not raise its residual. A site
    computed from the stream, as in a long text, contains the errors before it; errors that these hide are searched beside the
    returned values."""
    residuals = at.searched.side.residuals
    held: Setting = {}
    for known in at.searched.found:
        more = _as_read(at, known.values, knobs)
        if more and held.keys().isdisjoint(more):
            more = {**held, **more}
            left = with_residual(residuals, at.parts, more).residual
            if math.isfinite(left) and left <= SAME_WITHIN * at.residual:
                held = more
    return held


def _tried(at: _AtSite, held: Setting) -> list[Explanation]:
    """Return explanations: the `held` values if they suffice together, else settings found by a search beside them (without
    those of them that are not needed), else settings found without them."""
    residuals, floor = at.searched.side.residuals, at.limit / limit_of(at.parts[0].site)
    if held:
        together = _needed(at, held, held)
        if together.residual <= at.enough:
            return [together]
        decoder = replace(residuals.decoder, values=values_with_setting(residuals, held, at.parts[0].layer))
        beside = explanations(replace(residuals, decoder=decoder), at.parts, at.enough, floor)
        if beside:
            return [_needed(at, {**held, **one.values}, held) for one in beside]
    return explanations(residuals, at.parts, at.enough, floor)


def _needed(at: _AtSite, values: Setting, held: Setting) -> Explanation:
    """Return the values without those of `held` that can be left out with no more than rounding left."""
    residuals = at.searched.side.residuals
    for knob in held:
        without = {name: value for name, value in values.items() if name != knob}
        if with_residual(residuals, at.parts, without).residual <= at.enough:
            values = without
    return with_residual(residuals, at.parts, values)


def _holds(at: _AtSite, one: Explanation) -> bool:
    """Return whether a setting leaves rounding here and passes `_admits` at the layer's other sites that ask for its knobs. A
    narrow dtype is tested at later sites alone: an earlier site may be captured before that rounding."""
    residuals = at.searched.side.residuals
    values = values_with_setting(residuals, one.values, at.parts[0].layer)
    here = Explanation(values=one.values, residual=residual(residuals, at.parts, values))
    if not explains(residuals, at.parts, here, at.enough):
        return False
    if any(KNOBS[knob].same_function and next(_siblings(at, knob), None) is None for knob in one.values):
        return False  # no second site shows that the change at this one is undone
    return all(
        _admits(at, knob, values, other)
        for knob in one.values
        for other in _siblings(at, knob)
        if _is_shared(at, knob, other[0])
        if KNOBS[knob].kind != ROUNDING or site_order(other[0].site) > site_order(at.parts[0].site)
    )


def _is_shared(at: _AtSite, knob: str, other: Component) -> bool:
    """Return whether a knob has one value at both sites. A knob of norms has if both read the same norm that is not captured."""
    if knob in ORDER_OF_A_BLOCK or not knob.startswith(OWN_AT_EACH_SITE):
        return True
    if not knob.startswith(OF_NORMS):
        return False
    own, theirs = map(at.searched.side.residuals.hidden_before, (at.parts[0], other))
    return not own.isdisjoint(theirs)


def _admits(at: _AtSite, knob: str, values: Values, other: Sequence[Component]) -> bool:
    """Return whether a value of a knob leaves no more than `_may_leave` at another site of the layer. Probes in which that site
    needs a tensor that the checkpoint lacks are skipped (in a long text, the keys of a layer that shares another's)."""
    residuals = at.searched.side.residuals
    left = residual(residuals, other, values)
    if math.isinf(left):
        other = [part for part in other if not residuals.lacks(part, values)]
        if not other:
            return True
        left = residual(residuals, other, values)
    return left <= _may_leave(at, knob, values, other)


def _is_worse_elsewhere(at: _AtSite, one: Explanation, chosen: Explanation) -> bool:
    """Return whether a setting leaves more than rounding, and more than the chosen one, at another site of the layer: a value
    for queries alone is not tied with one for queries and keys if the keys need it too."""
    residuals = at.searched.side.residuals
    mine, theirs = (values_with_setting(residuals, each.values, at.parts[0].layer) for each in (one, chosen))
    return any(
        residual(residuals, other, mine) > max(at.limit, TIED * residual(residuals, other, theirs))
        for knob in one.values
        for other in _siblings(at, knob)
    )


def _may_leave(at: _AtSite, knob: str, values: Values, other: Sequence[Component]) -> float:
    """Return the residual that a value of a knob may leave at another site of the layer: some times that of the spec's values,
    but rounding if the knob is an order of the block that changes the site. Infinite if the formula cannot compute the site."""
    residuals = at.searched.side.residuals
    by_spec = residual(residuals, other)
    if knob not in ORDER_OF_A_BLOCK or not math.isfinite(by_spec):
        return max(MORE_ON_ALL * by_spec, at.limit)
    is_moved = not _equal(combined_difference(residuals, other), combined_difference(residuals, other, values))
    return MORE_ON_ALL * at.limit if is_moved else max(MORE_ON_ALL * by_spec, at.limit)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _siblings(at: _AtSite, knob: str) -> Iterator[list[Component]]:
    """Yield the layer's other visible sites whose formula asks for a knob."""
    side, own = at.searched.side, at.parts[0]
    for site in sites_with_formula(side.evidence):
        parts = side.shown(site) if layer_of(site) == own.layer and site != own.site else []
        if parts and knob in knobs_asked(side.residuals, parts[0]):
            yield parts


def _fit(at: _AtSite, knob: str, explanation: Explanation | None) -> KnobFit:
    """Return a side's fit of a knob at a site: the explanation's value, or the spec's value if there is none."""
    residuals, first = at.searched.side.residuals, at.parts[0]
    held = {} if explanation is None else explanation.values
    value = held.get(knob, residuals.decoder.knob(knob, first.layer))
    difference = difference_of(residuals, at.parts, knob, held)
    off = difference(value)
    left = float("inf") if off is None else float(off.norm())
    # A number that the formula does not ask for under these values is not determined by this side: it has no error.
    known = knobs_asked(residuals, first, held) if KNOBS[knob].kind == REAL else frozenset()
    is_read = knob in known
    full = without_rounding(residuals, first.layer, held, known)
    smooth = difference_of(residuals, at.parts, knob, {**held, **full})
    stderr = uncertainty(smooth, value, off) if is_read and off is not None else None
    drawn = picture(residuals, first, knob, values_with_setting(residuals, {**held, knob: value}, first.layer))
    return KnobFit(
        knob=knob, layer=layer_of(first.site), value=value, stderr=stderr, residual=left, n=0 if off is None else off.numel(),
        site=local_name(first.site), evidence={EXPLAINED_BY: FORMULA, **_tied(explanation, knob), **drawn},
    )  # fmt: skip


def _tied(explanation: Explanation | None, knob: str) -> dict[str, list[Any]]:
    """Return the other choices that explain as much as the explanation's."""
    if explanation is None or KNOBS[knob].kind != CHOICE:
        return {}
    others = [values[knob] for values in explanation.tied if values[knob] != explanation.values[knob]]
    return {"tied_with": others} if others else {}
