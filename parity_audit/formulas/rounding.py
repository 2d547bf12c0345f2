"""Rounding to a narrow dtype, as a step of a formula."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity_audit.formulas import choices

NARROW: dict[str, torch.dtype] = {name: getattr(torch, name) for name in choices.NARROW}
LARGEST_INTEGERS = {"int4": 7, "int8": 127}
"""The largest whole number of a format, which the largest number of a part becomes (symmetric, absolute maximum)."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x after a round trip through a narrow dtype."""
    return x.to(dtype).to(x.dtype)


def representable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether every value is one of the dtype's: then the tensor may well have been computed in it."""
    return bool((rounded(x, dtype) == x).all())


def any_narrow(x: Tensor) -> bool:
    """Whether the values fit bfloat16 or float16 exactly."""
    return any(representable(x, dtype) for dtype in NARROW.values())


def steps_of(arithmetic: str) -> Callable[[str, Tensor], Tensor]:
    """What an arithmetic does to a tensor at a place.

    `bfloat16 weights` rounds what is called "weights", `bfloat16 inputs and weights` both, `bfloat16 throughout` everything, `full`
    nothing.
    """
    name, _, place = arithmetic.partition(" ")
    places = place.split(" and ")

    def step(at: str, x: Tensor) -> Tensor:
        return rounded(x, NARROW[name]) if name in NARROW and (at in places or place == "throughout") else x

    return step


def refuse_narrow(arithmetic: str, *inputs: Tensor) -> None:
    """Refuse to tell a narrow dtype where inputs are in one anyway.

    Raises:
        ValueError: the arithmetic is not full, and every number of an input is one of a narrow dtype.
    """
    if arithmetic != choices.FULL and any(any_narrow(x) for x in inputs):
        raise ValueError("the inputs are in a narrow dtype themselves")
