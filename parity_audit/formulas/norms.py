"""Normalisation over the last axis.

    rms:    y = (W + offset) x / sqrt(mean(x^2) + eps)
    layer:  y = (W + offset) (x - mean(x)) / sqrt(var(x) + eps) + B

Sources: RMSNorm (arXiv 1910.07467), LayerNorm (arXiv 1607.06450); Gemma stores W - 1, which is an offset of 1.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

LAYER, RMS = "layer", "rms"
KINDS = (RMS, LAYER)
HEAD, PROJECTION = "head", "projection"


def centred(x: Tensor, kind: str) -> Tensor:
    """x, or x minus its mean over the components for LayerNorm."""
    return x - x.mean(-1, keepdim=True) if kind == LAYER else x


def normed(x: Tensor, kind: str, eps: float) -> Tensor:
    """x over its size, eps inside the root, before any weight. A negative eps, which a search may try, counts as 0."""
    x = centred(x, kind)
    return x * (x.square().mean(-1, keepdim=True) + max(eps, 0.0)).rsqrt()


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, kind: str = RMS, eps: float, offset: float = 0.0
) -> Tensor:  # fmt: skip
    """The normalised x, of its shape.

    Args:
        x: `[... component]`.
        weight: what broadcasts to x; None for ones.
        bias: as the weight; None for zeros.
        kind: "rms" or "layer".
        eps: added to the mean square (or variance).
        offset: added to the weight.
    """
    made = normed(x, kind, eps)
    made = made if weight is None else made * (weight + offset)
    return made if bias is None else made + bias


def norm_of_heads(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, axis: str = HEAD, kind: str, eps: float, offset: float
) -> Tensor:  # fmt: skip
    """A norm of queries or keys `[batch pos head d_head]`: each head by itself, or the whole projection at once."""
    if axis == HEAD:
        return norm(x, weight, bias, kind=kind, eps=eps, offset=offset)
    joined = rearrange(x, "batch pos head d_head -> batch pos (head d_head)")
    made = norm(joined, weight, bias, kind=kind, eps=eps, offset=offset)
    return rearrange(made, "batch pos (head d_head) -> batch pos head d_head", head=x.shape[2])
