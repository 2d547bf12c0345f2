"""Find out which of torch's own calls give the same bits as the fixed tiling, once for each shape.

The fixed tiling defines the result. One call of the library for the whole matrix is faster, and on many machines it
gives the same bits from some number of rows on. No library guarantees that, so before the first use of a shape the call
is compared with the fixed tiling on generated numbers. These numbers can stand for all others, because the order in
which a library sums depends on shapes, layouts and threads, not on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

SAMPLED_ROWS = 8
"""Rows, each with all columns, that are compared with the definition before another way is used for a shape."""
HUGE, SMALL = 2.0**10, 2.0**-12
"""Scales of the two terms of a sum that cancel and of its other terms, which are smaller by about 2^22.

With such terms, sums in different orders give different results.
"""
Implementation = Callable[..., Tensor]
"""One way to compute a result, such as a single call of the library."""
_CHOSEN: dict[Hashable, Implementation] = {}


def chosen(
    key: tuple[Hashable, ...],
    ways: Sequence[Implementation],
    definition: Implementation,
    compare: Callable[[Implementation], bool | None],
) -> Implementation:
    """Return the first way that gives the same bits as the definition according to `compare`, else the definition.

    The choice is remembered for this key, number of threads and precision setting. If a comparison is inconclusive
    (None), the definition is returned and nothing is remembered.
    """
    whole = (key, torch.get_num_threads(), torch.get_float32_matmul_precision())
    known = _CHOSEN.get(whole)
    if known is not None:
        return known
    for way in ways:
        found = compare(way)
        if found is None:
            return definition
        if found:
            _CHOSEN[whole] = way
            return way
    _CHOSEN[whole] = definition
    return definition


def same_bits(found: Tensor, expected: Tensor) -> bool | None:
    """Whether two results are equal; None if `expected` is mostly zero or not finite and thus hides the order of sums."""
    if not bool(torch.isfinite(expected).all()) or 2 * int(torch.count_nonzero(expected)) < expected.numel():
        return None
    return torch.equal(found, expected)


def cancelling(count: int, weight: Tensor) -> Tensor:
    """Return rows `[count, in]`; the product of each with one column of `weight` has two huge terms that cancel exactly.

    Such rows show the order of a sum in bfloat16. For ordinary rows, almost every order of a float32 sum rounds to the
    same bfloat16 output. What remains of small terms beside huge ones depends on the order.
    """
    generator = torch.Generator().manual_seed(0)
    size, columns = weight.shape
    rows = (torch.randn(count, size, generator=generator) * SMALL).to(weight.dtype)
    order = torch.rand(count, size, generator=generator).argsort(dim=1)
    first, second = order[:, 0], order[:, -1]
    column = torch.randint(columns, (count,), generator=generator)
    every = torch.arange(count)
    rows[every, first] = HUGE * weight[second, column]
    rows[every, second] = -HUGE * weight[first, column]
    return rows
