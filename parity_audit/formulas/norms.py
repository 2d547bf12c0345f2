"""Normalisation over the last axis.

    rms:    y = gain (W + offset) x / sqrt(m + eps)                  m = mean(x^2)
    layer:  y = gain (W + offset) (x - mean(x)) / sqrt(m + eps) + B  m = var(x)
    none:   y = x

If the eps stands outside the root, it is added to the root instead of to m. `SQUARES` holds what programs use in place of m, by
mistake or on purpose: the sum of squares over n - 1 (`torch.std`), the squared length of x (`torch.nn.functional.normalize`), or the
square of its mean or largest absolute value.

Sources: RMSNorm (arXiv 1910.07467), LayerNorm (arXiv 1607.06450); Gemma stores W - 1, which is an offset of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.choices import FULL, INSIDE, NORM_SIZES, OUTSIDE, UNDIVIDED, USUAL_SIZE
from parity_audit.formulas.rounding import NARROW, refuse_narrow, rounded

LAYER, RMS, ABSENT = "layer", "rms", "none"
HEAD, PROJECTION = "head", "projection"
AFTER_ROTATION = "after rotation"
SQUARES: dict[str, Callable[[Tensor], Tensor]] = dict(zip(NORM_SIZES[:-1], (
    lambda x: x.square().mean(-1, keepdim=True), lambda x: x.square().sum(-1, keepdim=True) / (x.shape[-1] - 1),
    lambda x: x.square().sum(-1, keepdim=True), lambda x: x.abs().mean(-1, keepdim=True).square(),
    lambda x: x.abs().amax(-1, keepdim=True).square(),
), strict=True))  # fmt: skip
"""The square of the size that a norm divides by, `[... 1]`, as a function of x `[... component]`."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The settings of a norm, as in the formulas of this module.

    `times` is how often the norm is applied in succession. `arithmetic` is `full`, or a narrow dtype followed by one of
    `choices.PLACES_IN_A_NORM`.
    """

    kind: str = RMS
    eps: float
    offset: float = 0.0
    eps_place: str = INSIDE
    size: str = USUAL_SIZE
    gain: float = 1.0
    times: int = 1
    arithmetic: str = FULL


def centred(x: Tensor, kind: str) -> Tensor:
    """Return x, minus its mean over the components if the norm is a LayerNorm."""
    return x - x.mean(-1, keepdim=True) if kind == LAYER else x


def normed(x: Tensor, of: Norm) -> Tensor:
    """Return x divided by its size, before weight and bias. A negative eps, which a search may try, counts as 0."""
    x = centred(x, of.kind)
    if of.size == UNDIVIDED:
        return x
    square, eps = SQUARES[of.size](x), max(of.eps, 0.0)
    if of.eps_place == OUTSIDE:
        return x / (square.sqrt() + eps)
    return x * (square + eps).rsqrt()


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, of: Norm) -> Tensor:
    """Return the normalised x, with weight and bias, of the shape of x.

    Args:
        x: `[... component]`.
        weight: a tensor that broadcasts to x; None for ones.
        bias: a tensor that broadcasts to x; None for zeros.
        of: the settings of the norm.

    Raises:
        ValueError: the arithmetic is narrow, but x fits a narrow dtype already, so its rounding could not be observed; or every
            step is to be rounded in a norm with another size or another place of the eps than usual.
    """
    if of.kind == ABSENT:
        return x
    if of.times > 1:
        x = norm(x, weight, bias, replace(of, times=of.times - 1))
    w = torch.ones((), dtype=x.dtype, device=x.device) if weight is None else weight + of.offset
    b = torch.zeros((), dtype=x.dtype, device=x.device) if bias is None else bias
    if of.arithmetic != FULL:
        return _narrow(x, w * of.gain, b, of)
    return normed(x, of) * w * of.gain + b


def _narrow(x: Tensor, w: Tensor, b: Tensor, of: Norm) -> Tensor:
    """Return the norm of x, rounded to a narrow dtype in one of `choices.PLACES_IN_A_NORM`."""
    name, _, place = of.arithmetic.partition(" ")
    refuse_narrow(of.arithmetic, x)

    def low(value: Tensor) -> Tensor:
        return rounded(value, NARROW[name])

    if place in ("throughout", "up to the weight"):
        if (of.size, of.eps_place) != (USUAL_SIZE, INSIDE):
            raise ValueError("every step is rounded in the usual norm alone")
        centre = low(centred(low(x), of.kind))
        root = low(low(low(centre.square()).mean(-1, keepdim=True) + of.eps).rsqrt())
        unit = low(centre * root)
        return low(low(unit * low(w)) + low(b)) if place == "throughout" else unit * w + b
    if place == "but for the reductions":
        return low(low(low(normed(low(x), of)) * low(w)) + low(b))
    unit = normed(low(x) if place.startswith("in") else x, of)
    if place == "weight":
        return unit * low(w) + low(b)
    if place == "before the weight":
        return low(unit) * w + b
    made = unit * w + b
    return low(made) if place.endswith("out") else made


def norm_of_heads(x: Tensor, weight: Tensor | None, bias: Tensor | None, of: Norm, *, axis: str = HEAD) -> Tensor:
    """Return queries or keys `[batch pos head d_head]`, normalised per head or over the whole projection at once.

    The weight has `d_head` components, which all heads share, or one component for each component of each head.
    """
    heads, d_head = x.shape[2:]
    if axis == HEAD:
        return norm(x, _of_each_head(weight, x), _of_each_head(bias, x), of)

    def of_all(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.flatten().repeat(heads if tensor.numel() == d_head else 1)

    made = norm(rearrange(x, "batch pos head d_head -> batch pos (head d_head)"), of_all(weight), of_all(bias), of)
    return rearrange(made, "batch pos (head d_head) -> batch pos head d_head", head=heads)


def _of_each_head(tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a norm's weight or bias in a shape that broadcasts to x `[batch pos head d_head]`."""
    if tensor is None or tensor.numel() == x.shape[-1]:
        return tensor
    return tensor.reshape(x.shape[2:])
