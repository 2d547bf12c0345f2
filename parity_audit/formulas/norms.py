"""Normalisation over the last axis.

    rms:    y = (W + offset) x / sqrt(mean(x^2) + eps)
    layer:  y = (W + offset) (x - mean(x)) / sqrt(var(x) + eps) + B
    none:   y = x

With the eps outside the root, it is added to the root instead.

Sources: RMSNorm (arXiv 1910.07467), LayerNorm (arXiv 1607.06450); Gemma stores W - 1, which is an offset of 1.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

LAYER, RMS, ABSENT = "layer", "rms", "none"
KINDS = (RMS, LAYER)
HEAD, PROJECTION = "head", "projection"
AFTER_ROTATION = "after rotation"
INSIDE, OUTSIDE = "inside the root", "outside the root"


def centred(x: Tensor, kind: str) -> Tensor:
    """x, or x minus its mean over the components for LayerNorm."""
    return x - x.mean(-1, keepdim=True) if kind == LAYER else x


def normed(x: Tensor, kind: str, eps: float, eps_place: str = INSIDE) -> Tensor:
    """x over its size, before any weight. A negative eps, which a search may try, counts as 0."""
    x = centred(x, kind)
    if eps_place == OUTSIDE:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + max(eps, 0.0))
    return x * (x.square().mean(-1, keepdim=True) + max(eps, 0.0)).rsqrt()


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, kind: str = RMS, eps: float, offset: float = 0.0,
    eps_place: str = INSIDE,
) -> Tensor:  # fmt: skip
    """The normalised x, of its shape.

    Args:
        x: `[... component]`.
        weight: what broadcasts to x; None for ones.
        bias: as the weight; None for zeros.
        kind: "rms", "layer" or "none".
        eps: added to the mean square (or variance).
        offset: added to the weight.
        eps_place: inside or outside the root.
    """
    if kind == ABSENT:
        return x
    made = normed(x, kind, eps, eps_place)
    made = made if weight is None else made * (weight + offset)
    return made if bias is None else made + bias


def norm_of_heads(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, axis: str = HEAD, kind: str, eps: float, offset: float,
    eps_place: str = INSIDE,
) -> Tensor:  # fmt: skip
    """A norm of queries or keys `[batch pos head d_head]`: each head by itself, or the whole projection at once."""
    if axis == HEAD:
        return norm(x, weight, bias, kind=kind, eps=eps, offset=offset, eps_place=eps_place)
    joined = rearrange(x, "batch pos head d_head -> batch pos (head d_head)")
    made = norm(joined, weight, bias, kind=kind, eps=eps, offset=offset, eps_place=eps_place)
    return rearrange(made, "batch pos (head d_head) -> batch pos head d_head", head=x.shape[2])
