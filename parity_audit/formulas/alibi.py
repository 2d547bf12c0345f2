"""ALiBi: a penalty for distance, with one slope per head.

    penalty_ij = m_h j        or, the same to a softmax,        -m_h (i - j)

Source: Press et al., arXiv 2108.12409. BLOOM and Falcon multiply positions of keys, MPT distances from the query.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.formulas.choices import FULL
from parity_audit.formulas.rounding import steps_of

SAME_SLOPE = torch.finfo(torch.bfloat16).eps
"""How far the factors of heads may be apart, relative, to be one: slopes are kept in float16 or bfloat16 by some programs."""


def standard_slopes(n_heads: int) -> list[float]:
    """2^(-8 h / n) for n a power of two; else those of the next lower one, then every other of the next higher.

    Source: Press et al., arXiv 2108.12409, appendix; BLOOM, MPT and Falcon follow it.
    """
    lower = 2 ** (n_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    between = [2.0 ** (-4.0 * (2 * h + 1) / lower) for h in range(n_heads - lower)]
    return first + between


def penalties(slopes: Tensor, queries: Tensor, keys: Tensor, *, arithmetic: str = FULL) -> Tensor:
    """What is added to scores `[batch head query key]`, in the dtype of the slopes `[head]`.

    Args:
        queries, keys: their positions `[batch query]` and `[batch key]`.
        arithmetic: `full`, or a narrow dtype and one of `choices.PLACES_IN_A_PENALTY`.
    """
    step = steps_of(arithmetic)
    steep = rearrange(slopes, "head -> head 1 1")
    places = rearrange(keys.to(slopes), "batch key -> batch 1 1 key")
    if not arithmetic.endswith("distances"):
        return step("penalties", steep * step("positions", places))
    apart = rearrange(queries.to(slopes), "batch query -> batch 1 query 1") - places
    return step("penalties of distances", -steep * step("distances", apart))


def times_usual(value: KnobValue) -> float | None:
    """By how much slopes are steeper than the usual ones, as one number for all heads; None where there is none."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, list) or not value:
        return 0.0 if value is None else None
    times = [float(slope) / usual for slope, usual in zip(value, standard_slopes(len(value)), strict=True)]
    mean = sum(times) / len(times)
    return mean if all(abs(one - mean) <= SAME_SLOPE * abs(mean) for one in times) else None
