"""An operation that can be run at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


class HeadCall(NamedTuple):
    """The head of an engine that applies it outside the model: its name, the function, and its input `[token d_model]`."""

    name: str
    head: Callable[[Tensor], Tensor]
    hidden: Tensor
