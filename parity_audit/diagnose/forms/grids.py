"""Values of a narrow format times a scale, as of a quantised cache or of quantised activations, whatever the scale is.

A floating-point format with m bits of mantissa has 2^m mantissas between a power of two and the next. Times one scale they are
other numbers, but as many. Integers times one scale are multiples of a step; that is asked first, since the first seven
integers have four mantissas too. Each token may have a scale of its own, or each head of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.diagnose.forms.pair import Form, Pair
from parity_audit.diagnose.thresholds import CLEAN, FEWEST_TOKENS
from parity_audit.formulas.rounding import LARGEST_INTEGERS

MANTISSAS = {"float8_e5m2": 4, "float8_e4m3fn": 8}
PER_GRID_VALUE = 3
"""Numbers of a token that are not 0 for each value of the grid; with fewer of them any numbers would do."""
FEWEST_MULTIPLES = 3
"""Numbers of a token that are not 0 for them to be called multiples of one step: one number is a multiple of itself, and two often
nearly are."""
EXACT_SHARE = 0.999
"""Share of the numbers, or of the tokens, that have to be on the grid of a narrow dtype next to the true ones, for a tensor to be
called rounded to it: a number near the middle of two may fall to either side, and a finer grid holds most of a coarser one."""


def rounded_with_a_scale(pair: Pair) -> Form | None:
    """What is left is 0 where every number is on a grid, next to the true one."""
    heads = pair.own.shape[1] // pair.d_head if pair.d_head and pair.own.shape[1] % pair.d_head == 0 else 1
    for groups in dict.fromkeys((1, heads)):
        own, true = (x.reshape(len(x) * groups, -1) for x in (pair.own, pair.true))
        some = own.abs().amax(1) > TINY
        own, true = own[some], true[some]
        if not len(own):
            return None
        for name in (*LARGEST_INTEGERS, *MANTISSAS):
            # What is on no grid shows it in the first tokens, a hundred times cheaper.
            few = _is_on_grid(name, own[:FEWEST_TOKENS], true[:FEWEST_TOKENS])
            if few and _is_on_grid(name, own, true):
                return Form(kind="rounded", value=f"{name} times a scale", usual="full", left=0.0)
    return None


def _is_on_grid(name: str, own: Tensor, true: Tensor) -> bool:
    """Whether the numbers of each row `[row, number]` are those of a format times a scale, next to the true ones."""
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
    return float(share.double().mean()) >= EXACT_SHARE


def _least(own: Tensor) -> Tensor:
    """The smallest number of each row that is not 0, `[row 1]`: the step of the subnormal numbers is no larger."""
    size = own.abs()
    return torch.where(size > 0, size, torch.inf).amin(1, keepdim=True)


def _mantissas(own: Tensor) -> Tensor:
    """How many different mantissas each row has, `[row]`."""
    logs = torch.log2(torch.frexp(own.abs()).mantissa)
    top = torch.where(own == 0, -torch.inf, logs).amax(1, keepdim=True)
    ordered = torch.where(own == 0, top, logs).sort(1).values
    around = (ordered[:, 0] + 1 - ordered[:, -1]) > CLEAN  # the next power of two follows the last one
    return (ordered.diff(dim=1) > CLEAN).sum(1) + around


def _steps(own: Tensor, largest: int) -> Tensor:
    """The largest step of which every number of a row is a multiple, at most so many of them; 0 where there is none, `[row]`."""
    top, found = own.abs().amax(1), torch.zeros(len(own), dtype=own.dtype)
    for count in range(largest, 0, -1):
        step = top / count
        multiples = own / step[:, None]
        fits = (multiples - multiples.round()).abs().amax(1) <= 100 * CLEAN
        found = torch.where(fits, step, found)
    return found
