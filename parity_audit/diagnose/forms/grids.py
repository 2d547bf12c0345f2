"""Recognise numbers of a narrow format times an unknown scale, as in a quantised cache or quantised activations.

A floating-point format with m bits of mantissa has 2^m mantissas between a power of two and the next. Multiplied by one
scale, the mantissas are other numbers, but there are as many of them. Integers times one scale are multiples of a step;
integer formats are tested first, since the first seven integers have only four mantissas as well. Each token may have a
scale of its own, or each head of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.diagnose.forms.pair import ActualExpected, Description
from parity_audit.diagnose.thresholds import CLEAN, FEWEST_TOKENS
from parity_audit.formulas.rounding import LARGEST_INTEGERS

MANTISSAS = {"float8_e5m2": 4, "float8_e4m3fn": 8}
PER_GRID_VALUE = 3
"""How many nonzero numbers a row needs for each mantissa of the format: with fewer, any numbers would fit."""
FEWEST_MULTIPLES = 3
"""How many nonzero numbers a row needs for its numbers to count as multiples of one step: one number is a multiple
of itself, and two often nearly are multiples of one step."""
EXACT_SHARE = 0.999
"""The share of the numbers, or of the rows, that must lie on the grid of a narrow dtype next to the true ones for a
tensor to count as rounded to it. It is below 1, because a number near the middle of two may be rounded to either,
and close to 1, because a finer grid holds most numbers of a coarser one."""


def rounded_with_a_scale(pair: ActualExpected) -> Description | None:
    """Return a description if (nearly) every number lies on the grid of one format times a scale, next to the true
    number; else None."""
    heads = pair.own.shape[1] // pair.d_head if pair.d_head and pair.own.shape[1] % pair.d_head == 0 else 1
    for groups in dict.fromkeys((1, heads)):
        own, true = (x.reshape(len(x) * groups, -1) for x in (pair.own, pair.true))
        some = own.abs().amax(1) > TINY
        own, true = own[some], true[some]
        if not len(own):
            return None
        for name in (*LARGEST_INTEGERS, *MANTISSAS):
            # Test the first rows first: numbers that are on no grid fail there already, at a hundredth of the cost.
            few = _is_on_grid(name, own[:FEWEST_TOKENS], true[:FEWEST_TOKENS])
            if few and _is_on_grid(name, own, true):
                return Description(kind="rounded", value=f"{name} times a scale", usual="full", share_left=0.0)
    return None


def _is_on_grid(name: str, own: Tensor, true: Tensor) -> bool:
    """Return whether the numbers of nearly every row `[row, number]` are those of a format times a scale, next to
    the true ones."""
    apart = (own - true).abs()
    there = (own != 0).sum(1)
    if name in LARGEST_INTEGERS:
        step = _steps(own, LARGEST_INTEGERS[name])
        return (
            _held(there >= FEWEST_MULTIPLES) and _held(step > 0) and _held(apart <= step[:, None] * (0.5 + 100 * CLEAN))
        )
    count = MANTISSAS[name]
    return (
        _held(there >= PER_GRID_VALUE * count)
        and _held(_mantissas(own) <= count)
        and _held(apart <= true.abs() / count + _least(own))
    )


def _held(share: Tensor) -> bool:
    """Return whether nearly all entries of a tensor of booleans are true."""
    return float(share.double().mean()) >= EXACT_SHARE


def _least(own: Tensor) -> Tensor:
    """Return the smallest nonzero size of a number in each row, `[row 1]`: the step of subnormal numbers is no
    larger."""
    size = own.abs()
    return torch.where(size > 0, size, torch.inf).amin(1, keepdim=True)


def _mantissas(own: Tensor) -> Tensor:
    """Return how many different mantissas each row has, `[row]`."""
    logs = torch.log2(torch.frexp(own.abs()).mantissa)
    top = torch.where(own == 0, -torch.inf, logs).amax(1, keepdim=True)
    ordered = torch.where(own == 0, top, logs).sort(1).values
    around = (ordered[:, 0] + 1 - ordered[:, -1]) > CLEAN  # the next power of two follows the last one
    return (ordered.diff(dim=1) > CLEAN).sum(1) + around


def _steps(own: Tensor, largest: int) -> Tensor:
    """Return the largest step of which every number of a row is a multiple, `[row]`; 0 if there is none. Multiples
    are at most `largest`."""
    top, found = own.abs().amax(1), torch.zeros(len(own), dtype=own.dtype)
    for count in range(largest, 0, -1):
        step = top / count
        multiples = own / step[:, None]
        fits = (multiples - multiples.round()).abs().amax(1) <= 100 * CLEAN
        found = torch.where(fits, step, found)
    return found
