"""Which of torch's own calls give the bits of the fixed tiling: measured once for each shape, then remembered.

The fixed tiling defines the result. One call of the library for the whole matrix is faster, and on many machines it
gives the same bits from some number of rows on. Nobody promises that, so it is tried on numbers of its own before the
first use of a shape. The order in which a library sums depends on shapes, layouts and threads, not on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

Way = Callable[..., Tensor]
_CHOSEN: dict[Hashable, Way] = {}


def chosen(
    key: tuple[Hashable, ...], ways: Sequence[Way], definition: Way, compare: Callable[[Way], bool | None]
) -> Way:
    """The first way that `compare` finds to give the bits of the definition, else the definition itself.

    Remembered for this key, number of threads and precision setting, unless a comparison was inconclusive (None).
    """
    whole = (torch.get_num_threads(), torch.get_float32_matmul_precision(), *key)
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
