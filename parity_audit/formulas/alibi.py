"""The slopes of ALiBi: a penalty for distance, one slope per head."""

from __future__ import annotations

from parity_audit.core.types import KnobValue

EVEN = 1e-3
"""How far the factors of heads may be apart, relative, to be one: slopes are kept in float16 or bfloat16 by some programs."""


def standard_slopes(n_heads: int) -> list[float]:
    """2^(-8 h / n) for n a power of two; else those of the next lower one, then every other of the next higher.

    Source: Press et al., arXiv 2108.12409, appendix; BLOOM, MPT and Falcon follow it.
    """
    lower = 2 ** (n_heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (h + 1) / lower) for h in range(lower)]
    between = [2.0 ** (-4.0 * (2 * h + 1) / lower) for h in range(n_heads - lower)]
    return first + between


def times_usual(value: KnobValue) -> float | None:
    """By how much slopes are steeper than the usual ones, as one number for all heads; None where there is none."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, list) or not value:
        return 0.0 if value is None else None
    times = [float(slope) / usual for slope, usual in zip(value, standard_slopes(len(value)), strict=True)]
    mean = sum(times) / len(times)
    return mean if all(abs(one - mean) <= EVEN * abs(mean) for one in times) else None
