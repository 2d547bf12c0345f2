"""An operation that can be run at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Case:
    """An operation at one size: `at(size)` is the followed row of its result."""

    name: str
    kind: str
    shape: str
    varied: str
    sizes: tuple[int, ...]
    at: Callable[[int], Tensor]
    like_it: int = 0
