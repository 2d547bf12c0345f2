"""Minimise a function of one number that has a single minimum, by golden-section search (Kiefer 1953)."""

from __future__ import annotations

from collections.abc import Callable

GOLDEN = (5**0.5 - 1) / 2
"""Share of the interval that each step keeps. With it, one of the two inner points of a step is an inner point of the
next."""
STEPS = 64
"""Number of steps; the minimum is then known to 4e-14 of the interval's width."""


def lowest(of: Callable[[float], float], low: float, high: float) -> float:
    """The argument between `low` and `high` at which `of` is smallest."""
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
