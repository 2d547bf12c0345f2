"""Rows times a weight (`mm`, `addmm`, `mv`, and with them `linear`) on the CPU.

Definition: each row is the first of a block of `ROWS` rows, the others zero, times the weight with its columns filled up
to a multiple of `COLUMNS`. The shape of that call does not depend on how many rows there are, nor on the place of a row,
so neither do the bits. Faster calls are taken where they were found to give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch import constant_pad_nd as pad

from parity_audit.batch_invariant.agreement import Way, chosen, same_bits

ROWS = 4
"""Rows in a block. Matrix libraries treat one to three rows differently from more; four cost little more than one."""
COLUMNS = 16
"""Columns: below this number, and in the rest of a division by it, matrix libraries use other kernels."""
SAMPLED_ROWS = 8
"""Rows computed by the definition, each with all columns, before another way is believed for a shape."""
HUGE, SMALL = 2.0**10, 2.0**-12
"""Two terms of the sum cancel and the others are smaller than them by about 2^22: other orders leave other remainders."""
ALIGNMENT = 64
"""Bytes, as torch allocates: libraries may sum rows that start elsewhere in another order."""


def mm(rows: Tensor, weight: Tensor) -> Tensor:
    """`[row, in]` times `[in, out]`."""
    if not rows.is_floating_point():
        return torch.mm(rows, weight, out=rows.new_empty(rows.shape[0], weight.shape[1]))
    return _product(None, rows, weight, 0, 1)


def addmm(bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * bias + alpha * rows @ weight`; the bias is one number, one row or a whole matrix."""
    if not rows.is_floating_point():
        return _as_it_is(bias.expand(rows.shape[0], weight.shape[1]), rows, weight, beta, alpha)
    return _product(bias.expand(rows.shape[0], weight.shape[1]), rows, weight, beta, alpha)


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """`[row, in]` times `[in]`."""
    return mm(matrix, vector[:, None])[:, 0]


def _product(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """`beta * bias + alpha * rows @ weight`, by the first way that has the bits of the definition."""
    count, size = rows.shape
    if not count or not size or not weight.shape[1]:
        return _as_it_is(bias, rows, weight, beta, alpha)
    place = weight.data_ptr() % ALIGNMENT
    key = ("rows", count, weight.shape, weight.stride(), weight.dtype, place)
    way = chosen(key, WAYS, _row_by_row, lambda way: _compare(way, count, weight))
    return way(bias, _aligned(rows), weight, beta, alpha)


def _aligned(rows: Tensor) -> Tensor:
    """The rows, contiguous and where torch would allocate them."""
    if rows.data_ptr() % ALIGNMENT == 0 and rows.is_contiguous():
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _as_it_is(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """One call of the library."""
    if bias is None:
        return rows.new_empty(rows.shape[0], weight.shape[1]).addmm_(rows, weight, beta=0)
    return bias.clone(memory_format=torch.contiguous_format).addmm_(rows, weight, beta=beta, alpha=alpha)


def _rows_filled_up(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    count = rows.shape[0]
    more = (0, 0, 0, -count % ROWS)
    bias = None if bias is None else pad(bias, more)
    return _as_it_is(bias, pad(rows, more), weight, beta, alpha)[:count]


def _all_filled_up(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Rows and columns; a transposed weight (that of `linear`) stays transposed."""
    columns = weight.shape[1]
    missing = -columns % COLUMNS
    wide = pad(weight.mT, (0, 0, 0, missing)).mT if weight.stride(0) == 1 else pad(weight, (0, missing))
    bias = None if bias is None else pad(bias, (0, missing))
    return _rows_filled_up(bias, rows, wide, beta, alpha)[:, :columns].contiguous()


def _row_by_row(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """The definition."""
    added = [None] * rows.shape[0] if bias is None else torch.split(bias, 1)
    parts = zip(added, torch.split(rows, 1), strict=True)
    return torch.cat([_all_filled_up(one, row, weight, beta, alpha) for one, row in parts])


WAYS = (_as_it_is, _rows_filled_up, _all_filled_up)


def _compare(way: Way, count: int, weight: Tensor) -> bool | None:
    """Cancelling rows at every place of calls for `count` rows against the same rows by the definition."""
    sample = _cancelling(SAMPLED_ROWS, weight)
    expected = _row_by_row(None, sample, weight, 0, 1)
    calls = -(-SAMPLED_ROWS // count)
    repeated = torch.arange(calls * count) % SAMPLED_ROWS
    found = [way(None, rows.clone(), weight, 0, 1) for rows in torch.split(sample[repeated], count)]
    return same_bits(torch.cat(found), expected[repeated])


def _cancelling(count: int, weight: Tensor) -> Tensor:
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
