"""Rounding to a narrow dtype, as a step of a formula."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity_audit.formulas import choices

NARROW: dict[str, torch.dtype] = {name: getattr(torch, name) for name in choices.NARROW}
LARGEST_INTEGERS = {"int4": 7, "int8": 127}
"""The largest whole number of an integer format, to which the largest absolute value of a quantised part is mapped (symmetric
quantisation by absolute maximum)."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x after a round trip through a narrow dtype."""
    return x.to(dtype).to(x.dtype)


def representable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the dtype holds every value exactly, so that the tensor may have been computed in it."""
    return bool((rounded(x, dtype) == x).all())


def any_narrow(x: Tensor) -> bool:
    """Whether bfloat16 or float16 holds every value exactly."""
    return any(representable(x, dtype) for dtype in NARROW.values())


def steps_of(arithmetic: str) -> Callable[[str, Tensor], Tensor]:
    """Return a function of (place, tensor) that rounds the tensor if the arithmetic rounds at this place.

    `bfloat16 weights` rounds the tensors of the place "weights", `bfloat16 inputs and weights` those of both places,
    `bfloat16 throughout` all tensors, and `full` none.
    """
    name, _, place = arithmetic.partition(" ")
    places = place.split(" and ")

    def step(at: str, x: Tensor) -> Tensor:
        return rounded(x, NARROW[name]) if name in NARROW and (at in places or place == "throughout") else x

    return step


def refuse_narrow(arithmetic: str, *inputs: Tensor) -> None:
    """Raise ValueError if rounding could not be observed, because the inputs are in a narrow dtype already.

    Raises:
        ValueError: the arithmetic is not `full`, and a narrow dtype holds every number of one of the inputs exactly.
    """
    if arithmetic != choices.FULL and any(any_narrow(x) for x in inputs):
        raise ValueError("the inputs are in a narrow dtype themselves")
