"""A norm with everything free but its kind: weight, bias and a gain per token, by alternating least squares.

    out_d = W_d g_t (x_d - mu_t) + B_d

RMS: mu = 0. LayerNorm: mu the mean over the components. The gain g is left free per token (and per head, where
heads are normalised apart), so neither eps nor a common factor can disturb W and B. W over tokens, then g over
components, until nothing moves. B is granted only where it explains clearly more, because a component that
hardly varies over tokens cannot tell its weight from a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import relative_rms
from parity_audit.formulas.norms import KINDS, centred

CLEAR = 4.0
FLOOR = 2e-7  # below it, differences are of the search and not of the data
ROUNDS = 20
SETTLED = 1e-10


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
    """A norm of one kind: W up to a common factor, B (None: not needed), g, and the relative rms left over."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    left: float


def best_shape(norm: Norm) -> tuple[Shape, bool]:
    """The simplest shape that leaves about as little as the best, and whether the other kind leaves clearly more."""
    shapes = [shape_of(norm, kind, with_bias=False) for kind in KINDS]
    if min(shape.left for shape in shapes) > FLOOR:
        shapes += [shape_of(norm, kind, with_bias=True) for kind in KINDS]
    least = max(min(shape.left for shape in shapes), FLOOR)
    chosen = next(shape for shape in shapes if shape.left <= CLEAR * least)
    others = [shape.left for shape in shapes if shape.kind != chosen.kind]
    return chosen, min(others) >= CLEAR * max(chosen.left, FLOOR)


def shape_of(norm: Norm, kind: str, *, with_bias: bool) -> Shape:
    """Alternate least squares of W (and B) over tokens and of the gain over components."""
    x, out = centred(norm.x, kind), norm.out
    gain = (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()
    weight, shift = torch.ones_like(x[0]), torch.zeros_like(x[0])
    for _ in range(ROUNDS):
        unit, before = x * gain, weight
        weight = _slope(unit, out, with_bias)
        shift = (out - unit * weight).mean(0) if with_bias else shift
        gain = gain_of(out - shift, weight * x)
        if relative_rms(weight - before, weight) < SETTLED:
            break
    left = relative_rms(out - x * gain * weight - shift, out)
    return Shape(kind=kind, weight=weight, bias=shift if with_bias else None, gain=gain, left=left)


def gain_of(out: Tensor, weighted: Tensor) -> Tensor:
    """g of out = g * weighted, one per token and block."""
    return (out * weighted).sum(-1, keepdim=True) / weighted.square().sum(-1, keepdim=True).clamp_min(1e-300)


def _slope(unit: Tensor, out: Tensor, with_bias: bool) -> Tensor:
    if with_bias:
        unit, out = unit - unit.mean(0), out - out.mean(0)
    return (unit * out).sum(0) / unit.square().sum(0).clamp_min(1e-300)
