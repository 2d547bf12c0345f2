"""Linear maps: y = x W^T + b, and how queries, keys and values are cut into heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

BLOCK_NUMBERS = 1 << 24
"""The number of a weight's entries that are converted at a time: 128 MiB in float64."""


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, `[... out]`, of x `[... in]` and a weight `[out in]`, in the dtype of x.

    A weight in another dtype is converted in parts, to save memory.
    """
    if weight.dtype == x.dtype:
        return functional.linear(x, weight, bias)
    parts = torch.split(weight, max(1, BLOCK_NUMBERS // weight.shape[1]))
    made = torch.cat([functional.linear(x, part.to(x.dtype)) for part in parts], -1)
    return made if bias is None else made + bias


def heads(x: Tensor, count: int) -> Tensor:
    """Return a projection `[batch pos (head d_head)]` cut into heads, `[batch pos head d_head]`."""
    return rearrange(x, "batch pos (head d_head) -> batch pos head d_head", head=count)


def joined(x: Tensor) -> Tensor:
    """Return heads `[batch pos head d_head]` joined side by side, `[batch pos (head d_head)]`."""
    return rearrange(x, "batch pos head d_head -> batch pos (head d_head)")


def taken_for(x: Tensor, steps: Sequence[int], *, laid: str, read: str) -> Tensor:
    """Return heads `[batch pos head d_head]` that a program writes in one order of axes and wrongly reads in another.

    Args:
        x: the right heads, `[batch pos head d_head]`.
        steps: the number of tokens in each step of the run; the program mixes the order within each step.
        laid, read: the order of axes in memory and the order that the program assumes, `choices.POS_HEAD` or `choices.HEAD_POS`.
    """
    found = (
        rearrange(
            rearrange(step, f"batch pos head d_head -> batch ({laid})"), f"batch ({read}) -> batch pos head d_head",
            pos=step.shape[1], head=step.shape[2],
        )
        for step in x.split(list(steps), dim=1)
    )  # fmt: skip
    return torch.cat(list(found), dim=1)
