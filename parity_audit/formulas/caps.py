"""Bounds on scores and logits.

    y = c tanh(x / c)              the soft-cap of Gemma 2 (arXiv 2408.00118)
    y = min(max(x, -c), c)         "clamped at c"

Both leave numbers that are much smaller than c unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.formulas.choices import CLAMPED, number_in


def capped(x: Tensor, cap: float | str | None) -> Tensor:
    """Return x, of any shape, limited by a bound.

    Args:
        cap: the bound c of a soft-cap, `choices.CLAMPED` with a number, or None for no bound.

    Raises:
        ValueError: a string that is not `choices.CLAMPED` with a number, or a clamp whose bound is not positive.
    """
    if cap is None:
        return x
    if not isinstance(cap, str):
        return cap * torch.tanh(x / cap)
    bound = number_in(cap, CLAMPED)
    if bound is None or bound <= 0:
        raise ValueError(f"no bound is called `{cap}`")
    return x.clamp(-bound, bound)
