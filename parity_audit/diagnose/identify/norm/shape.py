"""A norm with everything free but its kind: weight, bias and a gain per token, by least squares.

    out_d = W_d g_t (x_d - mu_t) + B_d

RMS: mu = 0. LayerNorm: mu the mean over the components. The gain g is left free per token (and per head, where
heads are normalised apart), so neither eps nor a common factor can disturb W and B. For given gains, W and B are
a line per component. What is left is a function of the gains alone, and is minimised by Gauss-Newton (variable
projection): alternating between W and g would take hundreds of rounds where a few channels outweigh all others, as
in trained models. B is granted only where it explains clearly more, because a component that hardly varies over
tokens cannot tell its weight from a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.diagnose.evidence import relative_rms
from parity_audit.diagnose.thresholds import CLEAR
from parity_audit.formulas.norms import KINDS, centred

FLOOR = 2e-7  # below it, differences are of the search and not of the data
ROUNDS = 60
"""Three are usual; a search that needs twenty times as many has not found what the data say."""
SETTLED = 1e-9
"""Of the outputs: what one more round would change."""
SHARE_SETTLED = 0.01
"""Or of what is left, whichever is more."""
HALVINGS = 20
DAMPING = 1e-14
"""Of the mean curvature: the common factor of all gains is not in the data."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """One norm: what goes in and out `[token block component]`, the checkpoint's weight and bias, if any.

    A block is what shares one gain: the whole vector, or one head. `w` and `b` are `[block component]`.
    """

    prefix: str
    site: str
    x: Tensor
    out: Tensor
    w: Tensor | None
    b: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A norm of one kind: W up to a common factor, B (None: not needed), g, and the relative rms left over.

    `settled`: the search proved that one more round changes nothing. Otherwise `left` is only an upper bound.
    """

    kind: str
    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    left: float
    settled: bool = True


def best_shape(norm: Norm) -> tuple[Shape, bool]:
    """The simplest shape that leaves about as little as the best, and whether the other kind leaves clearly more.

    A search that has not settled says nothing of its kind.
    """
    shapes = [shape_of(norm, kind, with_bias=False) for kind in KINDS]
    if min(shape.left for shape in shapes) > FLOOR:
        shapes += [shape_of(norm, kind, with_bias=True) for kind in KINDS]
    least = max(min(shape.left for shape in shapes), FLOOR)
    chosen = next(shape for shape in shapes if shape.left <= CLEAR * least)
    others = [shape for shape in shapes if shape.kind != chosen.kind]
    clear = min(shape.left for shape in others) >= CLEAR * max(chosen.left, FLOOR)
    return chosen, clear and all(shape.settled for shape in (chosen, *others))


def shape_of(norm: Norm, kind: str, *, with_bias: bool) -> Shape:
    """Least squares of W (and B) over tokens for the best gains."""
    x, out = centred(norm.x, kind), norm.out
    gain = (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()
    found, settled = _line(x, out, gain, with_bias), False
    for _ in range(ROUNDS):
        step = _gauss_newton(x * gain, found[0], out - x * gain * found[0] - found[1], with_bias)
        settled = relative_rms(x * gain * step * found[0], out) <= max(SETTLED, SHARE_SETTLED * found[2])
        if settled:
            break
        gain, found = _downhill(x, out, gain, step, found, with_bias)
    weight, shift, left = found
    return Shape(kind=kind, weight=weight, bias=shift if with_bias else None, gain=gain, left=left, settled=settled)


_Line = tuple[Tensor, Tensor, float]


def _line(x: Tensor, out: Tensor, gain: Tensor, with_bias: bool) -> _Line:
    """W, B and what they leave, for given gains."""
    unit = x * gain
    weight = _slope(unit, out, with_bias)
    shift = (out - unit * weight).mean(0) if with_bias else torch.zeros_like(weight)
    return weight, shift, relative_rms(out - unit * weight - shift, out)


def _gauss_newton(unit: Tensor, weight: Tensor, rest: Tensor, with_bias: bool) -> Tensor:
    """The relative change of every gain that removes most of `rest` `[token block component]`, W and B following it.

    A change of the gains moves component d by W_d u_d; the part of that which W_d and B_d take up again is projected out.
    """
    moved = rearrange(unit * weight, "t b c -> b t c")
    line = unit - unit.mean(0) if with_bias else unit
    line = rearrange(line / line.norm(dim=0).clamp_min(1e-300), "t b c -> b t c")
    taken_up = moved * line
    curvature = torch.diag_embed(moved.square().sum(-1)) - taken_up @ taken_up.mT
    if with_bias:
        curvature -= moved @ moved.mT / unit.shape[0]
    pull = (moved * rearrange(rest, "t b c -> b t c")).sum(-1, keepdim=True)
    size = torch.diagonal(curvature, dim1=-2, dim2=-1).mean(-1).clamp_min(1e-300)
    damped = curvature + DAMPING * size[:, None, None] * torch.eye(unit.shape[0], dtype=unit.dtype)
    step: Tensor = rearrange(torch.linalg.lstsq(damped, pull).solution, "b t one -> t b one")
    step -= step.mean(0)  # a common factor of all gains is W's
    return step


def _downhill(
    x: Tensor, out: Tensor, gain: Tensor, step: Tensor, found: _Line, with_bias: bool
) -> tuple[Tensor, _Line]:
    """The gains after the longest halving of a step that leaves less than before; those of before where there is none."""
    for halving in range(HALVINGS):
        tried = gain * (1 + step * 0.5**halving)
        line = _line(x, out, tried, with_bias)
        if line[2] < found[2]:
            return tried, line
    return gain, found


def gain_of(out: Tensor, weighted: Tensor) -> Tensor:
    """g of out = g * weighted, one per token and block."""
    return (out * weighted).sum(-1, keepdim=True) / weighted.square().sum(-1, keepdim=True).clamp_min(1e-300)


def _slope(unit: Tensor, out: Tensor, with_bias: bool) -> Tensor:
    if with_bias:
        unit, out = unit - unit.mean(0), out - out.mean(0)
    return (unit * out).sum(0) / unit.square().sum(0).clamp_min(1e-300)
