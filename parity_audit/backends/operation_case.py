"""An operation that can be run at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class OperationCase:
    """An operation of a model and the sizes at which it is run.

    `at(size)` runs it at one size and returns one row of the result, which is the same row at every size. `varied` names what the
    size counts, such as rows or queries. For `name`, `kind`, `shape` and `like_it` see `core.operations.Operation`.
    """

    name: str
    kind: str
    shape: str
    varied: str
    sizes: tuple[int, ...]
    at: Callable[[int], Tensor]
    like_it: int = 0


class HeadCall(NamedTuple):
    """The head of an engine that applies it outside the model: its name, its function, and its input `[token d_model]`."""

    name: str
    head: Callable[[Tensor], Tensor]
    hidden: Tensor
