"""ALiBi: a penalty on the scores that grows with the distance between query and key, with one slope per head.

    penalty_ij = m_h j        or        -m_h (i - j)

Both give the same softmax, because they differ by a constant per query. BLOOM and Falcon multiply the slope by the position of the
key, MPT multiplies it by the distance from the query. Source: Press et al., arXiv 2108.12409.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.formulas.choices import FULL
from parity_audit.formulas.rounding import steps_of

SAME_SLOPE = torch.finfo(torch.bfloat16).eps
"""The factors of the heads count as one common factor if each is within this relative distance of their mean: some programs store
slopes in float16 or bfloat16."""


def standard_slopes(n_heads: int) -> list[float]:
    """Return ALiBi's standard slope of each head: 2^(-8 h / n) for h = 1 to n if the number of heads n is a power of two.

    Otherwise the list holds the slopes for the next lower power of two, followed by every second slope for the next higher power.
    Source: Press et al., arXiv 2108.12409, appendix; BLOOM, MPT and Falcon follow it.
    """
    lower = 2 ** (n_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    between = [2.0 ** (-4.0 * (2 * h + 1) / lower) for h in range(n_heads - lower)]
    return first + between


def penalties(slopes: Tensor, queries: Tensor, keys: Tensor, *, arithmetic: str = FULL) -> Tensor:
    """Return the penalties to add to the scores, `[batch head query key]` or `[batch head 1 key]`, in the dtype of the slopes.

    They are computed from distances, one per query, only if `arithmetic` ends with "distances"; otherwise from the keys' positions.

    Args:
        slopes: one per head, `[head]`.
        queries, keys: the positions of queries `[batch query]` and of keys `[batch key]`.
        arithmetic: `full`, or a narrow dtype followed by one of `choices.PLACES_IN_A_PENALTY`.
    """
    step = steps_of(arithmetic)
    steep = rearrange(slopes, "head -> head 1 1")
    places = rearrange(keys.to(slopes), "batch key -> batch 1 1 key")
    if not arithmetic.endswith("distances"):
        return step("penalties", steep * step("positions", places))
    apart = rearrange(queries.to(slopes), "batch query -> batch 1 query 1") - places
    return step("penalties of distances", -steep * step("distances", apart))


def times_usual(value: KnobValue) -> float | None:
    """Return the common factor of all heads' slopes over the standard slopes, or None if the factors of the heads differ.

    An absent value (None) gives 0.
    """
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, list) or not value:
        return 0.0 if value is None else None
    times = [float(slope) / usual for slope, usual in zip(value, standard_slopes(len(value)), strict=True)]
    mean = sum(times) / len(times)
    return mean if all(abs(one - mean) <= SAME_SLOPE * abs(mean) for one in times) else None
