"""Find tokens for which rounding decides to which experts they go, and which experts a side chose.

A router sends a token to the k experts with the largest scores. If the k-th and the next score are closer than
rounding, two correct programs may choose differently. From there on, everything that depends on that token, including
later tokens in later blocks, differs by far more than rounding. Such a choice says nothing about a program: the run
that it is compared with has to use the same experts at that place (see `diagnose.routing`).

A choice is undecided if small changes of the judge's logits lead to another one. A side made the other choice if its
router's weights show it. If a side does not show these weights, it made the other choice if its error after the router
is far larger at this token than at its other tokens, where the error is rounding, or the effect of whatever else is
wrong.
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
"""Function from a layer and its router's logits to expert weights, both `[batch pos expert]`; the weight of an expert
that is not chosen is 0."""
ROUTER_LOGITS, ROUTER_WEIGHTS = "mlp.router_logits", "mlp.router_weights"
DTYPE = "float32"
"""The only dtype in which choices are followed. In narrower dtypes so many choices are undecided that they are part of
the floor: the reference makes as many others."""
SHOW_CHOICES = ("mlp.routed", "mlp_proj", "mlp_out", "resid_post")
"""Sites that show which experts were chosen, nearest first. In a replay that is given the router's weights, the output
of the experts shows no choice."""
REACH = 16.0
"""Size by which logits are moved, in multiples of their usual rounding: the largest of thousands of roundings is five
times the usual one, and another program's rounding may be four times the reference's (`core.limits.PARITY_RATIO`)."""
APART = 1e-3
"""Distance, in multiples of that rounding, at which logits are kept that were moved to a common middle: they need an
order."""
DRAWS = 16
"""Number of random changes of that size that are tried. If two logits are within rounding of each other, each change
exchanges them with a probability of almost one half, so one such pair in fifty thousand is missed."""
HALVINGS = 24
"""Bisection steps by which a change that leads to another choice is reduced to the smallest such change."""
STANDS_OUT = 16.0
"""A token went to other experts if its error is more than this many times the usual one: kernels may differ by as much
inside a block (`core.limits.INNER_RATIO`)."""


Source = TypeVar("Source", bound=TensorSource)


@dataclass(frozen=True, kw_only=True)
class Pair(Generic[Source]):
    """A judge's capture and the native run of the same program; the distance between them is rounding."""

    judge: Source
    floor: Source


@dataclass(frozen=True, kw_only=True)
class OtherChoice:
    """The tokens of one probe that a side sent to other experts of one layer than the judge, within rounding.

    `taken` `[batch pos]` is True at those tokens; `weights` `[batch pos expert]` are the router's weights with the
    other choice.
    """

    layer: int
    taken: Tensor
    weights: Tensor

    @property
    def site(self) -> str:
        """The site of the router's weights, which make the choice."""
        return f"blocks.{self.layer}.{ROUTER_WEIGHTS}"


def other_choices(
    side: TensorSource, judge: TensorSource, rounding: Pair[Source], probe: Probe, route: Route, dtype: str = DTYPE
) -> Iterator[OtherChoice]:
    """Yield the choices of one side on one probe that differ from the judge's within rounding, from the first layer on.

    If the judge did not run on the side's own inputs, only the first one counts, because it changes the inputs of later
    layers. `rounding` shows by how much logits of this probe are rounded. At least the error of storing them in `dtype`
    is assumed; `dtype` is the dtype of the side where that is narrower than the one that was asked for.
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
            taken &= (own != judged).any(-1) & _real(probe)  # a choice that was imposed on the judge before now agrees
        if bool(taken.any()):
            yield OtherChoice(layer=layer, taken=taken, weights=weights)


def _undecided(logits: Tensor, rounding: float, layer: int, route: Route) -> tuple[Tensor, Tensor]:
    """The tokens `[batch pos]` whose experts change within the logits' rounding, and the weights of the nearest other
    choice."""
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
    # Find the smallest change in that direction that leads to the other choice, so that the weights stay close to those of the
    # unchanged logits.
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
    """The median error of a router's logits over real tokens, but at least the error of storing them in `dtype`."""
    site = f"blocks.{layer}.{ROUTER_LOGITS}"
    if not all(site in side.sites(probe.name) for side in (pair.judge, pair.floor)):
        return 0.0
    error = _errors(pair.floor, pair.judge, probe, site)
    own = 0.0 if error is None else _usual(error, _real(probe)[:, : error.shape[1]])
    return max(own, guard(_rms(_whole(pair.judge, probe, site)), dtype))


def _experts(side: TensorSource, probe: Probe, layer: int, logits: Tensor) -> Tensor | None:
    """The experts `[batch pos expert]` with a weight in a side's router; None if the side does not show them for these
    tokens."""
    site = f"blocks.{layer}.{ROUTER_WEIGHTS}"
    if site not in side.sites(probe.name) or side.shape(probe.name, site) != tuple(logits.shape):
        return None
    return _whole(side, probe, site) != 0


def _exchanged(own: Tensor, logits: Tensor, rounding: float, layer: int, route: Route) -> tuple[Tensor, Tensor]:
    """The tokens `[batch pos]` sent to `own` experts that rounding may have chosen, and that choice's weights.

    Let the middle lie between the smallest logit of these experts and the largest of the others. Logits on the wrong
    side of it are moved to it. If the router then still chooses otherwise, it does not choose by the size of logits,
    and other choices within rounding are searched instead.
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
    """The undecided tokens `[batch pos]` at which a side's error after the router is far above its usual one."""
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
    """The rms of the difference of each token's values, `[batch pos]`; None if the shapes cannot be compared."""
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
    """The median error of these tokens, ignoring NaN; 0 if there is no token."""
    return float(error[tokens].nanmedian()) if bool(tokens.any()) else 0.0


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
