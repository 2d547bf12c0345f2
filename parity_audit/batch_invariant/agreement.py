"""Which of torch's own calls give the bits of the fixed tiling: measured once for each shape, then remembered.

The fixed tiling defines the result. One call of the library for the whole matrix is faster, and on many machines it
gives the same bits from some number of rows on. Nobody promises that, so it is tried on numbers of its own before the
first use of a shape. The order in which a library sums depends on shapes, layouts and threads, not on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

SAMPLED_ROWS = 8
"""Rows computed by the definition, each with all columns, before another way is believed for a shape."""
HUGE, SMALL = 2.0**10, 2.0**-12
"""Two terms of the sum cancel and the others are smaller than them by about 2^22: other orders leave other remainders."""
Way = Callable[..., Tensor]
_CHOSEN: dict[Hashable, Way] = {}


def chosen(
    key: tuple[Hashable, ...], ways: Sequence[Way], definition: Way, compare: Callable[[Way], bool | None]
) -> Way:
    """The first way that `compare` finds to give the bits of the definition, else the definition itself.

    Remembered for this key, number of threads and precision setting, unless a comparison was inconclusive (None).
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
    """Whether two results are equal; None where they are mostly zero or not finite, which shows no order of sums."""
    if not bool(torch.isfinite(expected).all()) or 2 * int(torch.count_nonzero(expected)) < expected.numel():
        return None
    return torch.equal(found, expected)


def cancelling(count: int, weight: Tensor) -> Tensor:
    """Rows `[count, in]` whose products with one column each hold two huge terms that cancel exactly.

    In bfloat16 almost every order of a float32 sum rounds to the same output; what is left of small terms beside huge
    ones does not.
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
