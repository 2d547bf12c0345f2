"""Linear maps: y = x W^T + b, and how queries, keys and values are cut into heads."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

BLOCK_NUMBERS = 1 << 24
"""Numbers of a weight that are converted at a time: 128 MiB in float64."""


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[... out]` of x `[... in]` and a weight `[out in]`, in x's dtype; a weight in another one is converted by parts."""
    if weight.dtype == x.dtype:
        return functional.linear(x, weight, bias)
    parts = torch.split(weight, max(1, BLOCK_NUMBERS // weight.shape[1]))
    made = torch.cat([functional.linear(x, part.to(x.dtype)) for part in parts], -1)
    return made if bias is None else made + bias


def heads(x: Tensor, count: int) -> Tensor:
    """A projection `[batch pos (head d_head)]` as its heads `[batch pos head d_head]`."""
    return rearrange(x, "batch pos (head d_head) -> batch pos head d_head", head=count)


def joined(x: Tensor) -> Tensor:
    """Heads `[batch pos head d_head]` side by side `[batch pos (head d_head)]`."""
    return rearrange(x, "batch pos head d_head -> batch pos (head d_head)")
