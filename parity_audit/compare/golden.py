"""The lowest point of a function of one number that has a single valley, by golden section (Kiefer 1953)."""

from __future__ import annotations

from collections.abc import Callable

GOLDEN = (5**0.5 - 1) / 2
"""The share of a span that each step keeps: one of its two inner points is then one of the next step's."""
STEPS = 64
"""The span is then known to 4e-14 of its width."""


def lowest(of: Callable[[float], float], low: float, high: float) -> float:
    """Where `of` is lowest between `low` and `high`."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = of(left), of(right)
    for _ in range(STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = of(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = of(right)
    return (low + high) / 2
