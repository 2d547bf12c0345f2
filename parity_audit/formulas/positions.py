"""Positions of tokens, and which keys a query may attend to.

Positions count real tokens only, so padding on the left shifts nothing. A query sees the real tokens that are not after it
and, where there is a window w, fewer than w positions before it: 0 <= i - j < w. Source: Mistral (arXiv 2310.06825).
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor


def counted(mask: Tensor) -> Tensor:
    """Positions `[batch pos]` from 0 of a mask `[batch pos]` that is 1 at real tokens; padding before them gets 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def visible(mask: Tensor, rows: Tensor, *, window: int | None = None, causal: bool = True) -> Tensor:
    """Which keys each query may attend to, `[batch 1 query key]`, True where it may.

    Args:
        mask: 1 at real tokens `[batch key]`.
        rows: places of the queries in the sequence `[query]`.
        window: how many keys a query sees, itself included; None for all of them.
        causal: whether later keys are hidden.
    """
    length = mask.shape[-1]
    distance = rearrange(rows, "query -> query 1") - rearrange(rows.new_tensor(range(length)), "key -> 1 key")
    seen = rearrange(mask.bool(), "batch key -> batch 1 1 key")
    if causal:
        seen = seen & (distance >= 0)
    return seen if window is None else seen & (distance < window)
