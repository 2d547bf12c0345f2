"""Where rounding decides which experts a token goes to, and which way a side went.

A router sends a token to the k experts of the largest scores. Where the last of those and the first of the others are closer than
rounding, two correct programs may choose differently, and from there on everything of that token, and of later tokens in later
blocks, differs by far more than rounding. Such a choice says nothing about a program: what it is held against has to take the
same experts at that place (see `diagnose.routing`).

A choice is undecided where small changes of the judge's logits make another one. A side took the other one where its router's
weights say so; where it does not show them, where its error behind the router stands out from its own error at other tokens,
which is rounding, or the effect of whatever is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from parity_audit.compare.floor import guard
from parity_audit.compare.shapes import Misfit, common_shape
from parity_audit.compare.source import TensorSource
from parity_audit.core.sites import layer_of, local_name
from parity_audit.core.types import Probe

Route = Callable[[int, Tensor], Tensor]
"""Weights `[batch pos expert]` that a router of a layer makes of its logits of that shape, 0 where an expert is not chosen."""
ROUTER_LOGITS, ROUTER_WEIGHTS = "mlp.router_logits", "mlp.router_weights"
DTYPE = "float32"
"""In narrower dtypes so many choices are undecided that they are part of the floor: the reference makes as many others."""
SHOW_CHOICES = ("mlp.routed", "mlp_proj", "mlp_out", "resid_post")
"""Sites that show which experts were chosen, nearest first: what the experts made is no sign where their weights are replayed."""
REACH = 16.0
"""How far logits are moved, in multiples of their usual rounding: the largest of thousands of roundings is five times the usual one,
and another program's may be four times the reference's (`core.limits.PARITY_RATIO`)."""
APART = 1e-3
"""How far logits that were moved to their middle are kept apart, in multiples of that rounding: they have an order, and no more."""
DRAWS = 16
"""Random changes of that size that are tried: of two logits within rounding of each other each exchanges them with a chance of
almost a half, so that one in fifty thousand is missed."""
HALVINGS = 24
"""Steps in which the change that makes another choice is made as small as it can be."""
STANDS_OUT = 16.0
"""How many times a token's error is the usual one where it went to other experts: as much as kernels may differ inside a block
(`core.limits.INNER_RATIO`)."""


Source = TypeVar("Source", bound=TensorSource)


@dataclass(frozen=True, kw_only=True)
class Pair(Generic[Source]):
    """A judge's capture and the native run of the same program, whose distance is rounding."""

    judge: Source
    floor: Source


@dataclass(frozen=True, kw_only=True)
class OtherChoice:
    """The tokens of one probe that a side sent to other experts of one layer than the judge, and may send there.

    `taken` `[batch pos]` is True at those tokens; `weights` `[batch pos expert]` are the router's weights with the other choice.
    """

    layer: int
    taken: Tensor
    weights: Tensor

    @property
    def site(self) -> str:
        """The site whose tensor makes the choice."""
        return f"blocks.{self.layer}.{ROUTER_WEIGHTS}"


def other_choices(
    side: TensorSource, judge: TensorSource, rounding: Pair[Source], probe: Probe, route: Route, dtype: str = DTYPE
) -> Iterator[OtherChoice]:
    """The choices of one side on one probe that differ from the judge's within rounding, by layer from the first on.

    Of a run that was not replayed on the side's own inputs only the first one counts: what differs there makes later layers
    differ. `rounding` shows how far logits of this probe are rounded; by no less than what storing them in `dtype` costs, the side's
    own where that is narrower than what was asked for.
    """
    named = (site for site in judge.sites(probe.name) if local_name(site) == ROUTER_LOGITS)
    for layer in sorted(layer for site in named if (layer := layer_of(site)) is not None):
        logits = _whole(judge, probe, f"blocks.{layer}.{ROUTER_LOGITS}")
        rounding_here = _rounding(rounding, probe, layer, dtype)
        own, judged = (_experts(one, probe, layer, logits) for one in (side, judge))
        if own is None or judged is None:
            undecided, weights = _undecided(logits, rounding_here, layer, route)
            taken = undecided & _real(probe)
            taken = _stands_out(side, judge, probe, layer, taken, dtype) if bool(taken.any()) else taken
        else:
            taken, weights = _exchanged(own, logits, rounding_here, layer, route)
            taken &= (own != judged).any(-1) & _real(probe)  # a choice that was imposed before is the same by now
        if bool(taken.any()):
            yield OtherChoice(layer=layer, taken=taken, weights=weights)


def _undecided(logits: Tensor, rounding: float, layer: int, route: Route) -> tuple[Tensor, Tensor]:
    """The tokens `[batch pos]` whose experts change with the logits' rounding, and the weights of the nearest other choice."""
    weights = route(layer, logits)
    chosen = weights != 0
    draw = torch.Generator().manual_seed(layer)
    undecided = torch.zeros(logits.shape[:-1], dtype=torch.bool)
    change = torch.zeros_like(logits)
    for number in range(DRAWS):
        size = REACH * rounding * (number + 1) / DRAWS
        moved = size * torch.randn(logits.shape, generator=draw, dtype=logits.dtype)
        other = ((route(layer, logits + moved) != 0) != chosen).any(-1) & ~undecided
        change[other] = moved[other]
        undecided |= other
    if not bool(undecided.any()):
        return undecided, weights
    # The smallest change on the way that makes the other choice: the weights are then those of the unchanged logits.
    few, way, usual = logits[undecided][None], change[undecided][None], chosen[undecided][None]
    low, high = torch.zeros_like(way[..., :1]), torch.ones_like(way[..., :1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        same = ((route(layer, few + middle * way) != 0) == usual).all(-1, keepdim=True)
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    weights = weights.clone()
    weights[undecided] = route(layer, few + high * way)[0]
    return undecided, weights


def _rounding(pair: Pair[Source], probe: Probe, layer: int, dtype: str) -> float:
    """The usual error of a router's logits: the median over real tokens, at least what storing them costs."""
    site = f"blocks.{layer}.{ROUTER_LOGITS}"
    if not all(site in side.sites(probe.name) for side in (pair.judge, pair.floor)):
        return 0.0
    error = _errors(pair.floor, pair.judge, probe, site)
    own = 0.0 if error is None else _usual(error, _real(probe)[:, : error.shape[1]])
    return max(own, guard(_rms(_whole(pair.judge, probe, site)), dtype))


def _experts(side: TensorSource, probe: Probe, layer: int, logits: Tensor) -> Tensor | None:
    """The experts `[batch pos expert]` that a side's router weighs, for the tokens of these logits; None where it shows none."""
    site = f"blocks.{layer}.{ROUTER_WEIGHTS}"
    if site not in side.sites(probe.name) or side.shape(probe.name, site) != tuple(logits.shape):
        return None
    return _whole(side, probe, site) != 0


def _exchanged(own: Tensor, logits: Tensor, rounding: float, layer: int, route: Route) -> tuple[Tensor, Tensor]:
    """The tokens `[batch pos]` that are sent to `own` experts where rounding alone can have chosen them, and the weights of that
    choice.

    Logits on the wrong side of the middle between the smallest of these experts and the largest of the others are moved there.
    Where the router still chooses otherwise, it doesn't go by the size of logits, and other choices near by are looked for.
    """
    weights = route(layer, logits)
    usual = weights != 0
    other = (own != usual).any(-1) & (own.sum(-1) == usual.sum(-1))
    if not bool(other.any()):
        return other, weights
    least, most = (
        logits.masked_fill(~own, torch.inf).amin(-1, keepdim=True),
        logits.masked_fill(own, -torch.inf).amax(-1, keepdim=True),
    )
    middle, apart = (least + most) / 2, APART * rounding
    moved = torch.where(own, logits.clamp_min(middle + apart), logits.clamp_max(middle - apart))
    made = route(layer, moved)
    reached = ((made != 0) == own).all(-1)
    taken = other & reached & ((moved - logits).abs().amax(-1) <= REACH * rounding)
    weights = torch.where(taken[..., None], made, weights)
    if bool((other & ~reached).any()):
        undecided, near = _undecided(logits, rounding, layer, route)
        more = other & ~reached & undecided & ((near != 0) == own).all(-1)
        taken, weights = taken | more, torch.where(more[..., None], near, weights)
    return taken, weights


def _stands_out(
    side: TensorSource, judge: TensorSource, probe: Probe, layer: int, undecided: Tensor, dtype: str
) -> Tensor:  # fmt: skip
    """The undecided tokens `[batch pos]` at which a side's error behind the router is far above its usual one."""
    for name in SHOW_CHOICES:
        site = f"blocks.{layer}.{name}"
        shown = all(site in one.sites(probe.name) for one in (side, judge))
        error = _errors(side, judge, probe, site) if shown else None
        if error is not None:
            undecided = undecided.clone()
            undecided[:, error.shape[1] :] = False  # a port may run fewer positions
            here = undecided[:, : error.shape[1]]
            usual = _usual(error, _real(probe)[:, : error.shape[1]] & ~here)
            here &= error > STANDS_OUT * max(usual, guard(_rms(_whole(judge, probe, site)), dtype))
            return undecided
    return torch.zeros_like(undecided)


def _errors(side: TensorSource, judge: TensorSource, probe: Probe, site: str) -> Tensor | None:
    """The rms of the difference of each token's values, `[batch pos]`; None where the shapes do not fit."""
    common = common_shape([side, judge], probe.name, site)
    if isinstance(common, Misfit):
        return None
    own, exact = (one.rows(probe.name, site, 0, common[1]).double() for one in (side, judge))
    return (own - exact).square().mean(-1).sqrt()


def _whole(side: TensorSource, probe: Probe, site: str) -> Tensor:
    return side.rows(probe.name, site, 0, side.shape(probe.name, site)[1]).double()


def _real(probe: Probe) -> Tensor:
    return torch.tensor(probe.mask, dtype=torch.bool)


def _usual(error: Tensor, tokens: Tensor) -> float:
    """The median error of these tokens, 0 where there is none; NaN counts as nothing."""
    return float(error[tokens].nanmedian()) if bool(tokens.any()) else 0.0


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
