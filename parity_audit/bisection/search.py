"""Bisection where some places cannot be judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")


def neighbours(low: int, high: int, state: Callable[[int], State | None]) -> tuple[int, int]:
    """Two judged places, as near to each other as can be, between which the state changes.

    `low` and `high` have been judged, and differ. A place whose state is None is left out: what lies on both sides of it
    is still asked. Where the state changes more than once, one of the changes is found.
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
