"""Bisection over places of which some cannot be judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")


def neighbours(low: int, high: int, state: Callable[[int], State | None]) -> tuple[int, int]:
    """Two judged places, with no other judged place between them, between which the state changes.

    `low` and `high` must have been judged, with different states. A place whose state is None is skipped, and the
    places on both sides of it are still tried. If the state changes more than once, one of the changes is found.
    """
    first, unjudged = state(low), set[int]()
    while between := [place for place in range(low + 1, high) if place not in unjudged]:
        middle = min(between, key=lambda place: abs(2 * place - low - high))
        seen = state(middle)
        if seen is None:
            unjudged.add(middle)
        elif seen == first:
            low = middle
        else:
            high = middle
    return low, high
