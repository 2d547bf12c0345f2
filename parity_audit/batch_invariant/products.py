"""Rows times a weight (`mm`, `addmm`, `mv`, and with them `linear`) on the CPU.

The result is defined as follows: each row becomes the first row of a block of `ROWS` rows, the other rows being zero.
The block is multiplied by the weight, whose columns are padded with zeros to a multiple of `COLUMNS`. The shape of that
call depends neither on the number of rows nor on the place of a row, so the bits do not depend on them either. The call
runs in one thread, since each library divides a product among threads in its own way. Faster calls are used if a
comparison has shown that they give the same bits.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch import constant_pad_nd as pad

from parity_audit.batch_invariant.agreement import SAMPLED_ROWS, SMALL, Implementation, cancelling, chosen, same_bits

ROWS = 4
"""Rows in a block. Matrix libraries use other kernels for one to three rows, and four rows cost little more than one."""
COLUMNS = 16
"""Columns are padded to a multiple of this number; for the columns beyond a multiple, libraries use other kernels."""
ALIGNMENT = 64
"""Alignment in bytes of tensors that torch allocates; libraries may sum in another order if rows start elsewhere."""


def times(left: Tensor, weight: Tensor) -> Tensor:
    """Return `[..., in]` times `[in, out]`; all dimensions but the last are rows."""
    shape = (*left.shape[:-1], weight.shape[1])
    rows = left if left.dim() == 2 else left.reshape(-1, left.shape[-1])
    if not rows.is_floating_point():
        return torch.mm(rows, weight, out=rows.new_empty(rows.shape[0], weight.shape[1])).view(shape)
    return _product(None, rows, weight, 0, 1, shape)


def mm(rows: Tensor, weight: Tensor) -> Tensor:
    """Return `[row, in]` times `[in, out]`."""
    return times(rows, weight)


def addmm(bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `beta * bias + alpha * rows @ weight`; the bias is one number, one row or a whole matrix."""
    shape = (rows.shape[0], weight.shape[1])
    if not rows.is_floating_point():
        return _as_it_is(bias.expand(shape), rows, weight, beta, alpha)
    return _product(bias.expand(shape), rows, weight, beta, alpha, shape)


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return `[row, in]` times `[in]`."""
    return mm(matrix, vector[:, None])[:, 0]


def _product(
    bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float, shape: tuple[int, ...]
) -> Tensor:
    """Return `beta * bias + alpha * rows @ weight` in `shape`, by the first way that gives the bits of the definition."""
    count, size = rows.shape
    if not count or not size or not weight.shape[1]:
        return _as_it_is(bias, rows, weight, beta, alpha).view(shape)
    place = weight.data_ptr() % ALIGNMENT
    # `beta` and `alpha` belong to the key, because a library that takes them into its sums may sum in another order.
    key = ("rows", count, weight.shape, weight.stride(), weight.dtype, place, bias is None, beta, alpha)
    way = chosen(
        key, ONE_ROW if count == 1 else WAYS, _row_by_row, lambda way: _compare(way, count, bias, weight, beta, alpha)
    )
    return way(bias, _aligned(rows), weight, beta, alpha).resize_(shape)  # drops the padding


def _aligned(rows: Tensor) -> Tensor:
    """Return the rows as a contiguous tensor that is aligned as torch allocates it."""
    if rows.data_ptr() % ALIGNMENT == 0 and rows.is_contiguous():
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _as_it_is(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute the result with one call of the library for all rows."""
    if bias is None:
        return rows.new_empty(rows.shape[0], weight.shape[1]).addmm_(rows, weight, beta=0)
    return bias.clone(memory_format=torch.contiguous_format).addmm_(rows, weight, beta=beta, alpha=alpha)


def _repeated(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute a single row with a block whose rows are all this row."""
    block = rows.expand(ROWS, -1)
    if bias is None:
        return rows.new_empty(ROWS, weight.shape[1]).addmm_(block, weight, beta=0)
    return _as_it_is(bias.expand(ROWS, -1), block, weight, beta, alpha)


def _rows_filled_up(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute the result with the number of rows padded to a multiple of `ROWS`."""
    more = (0, 0, 0, -rows.shape[0] % ROWS)
    bias = None if bias is None else pad(bias, more)
    return _as_it_is(bias, pad(rows, more), weight, beta, alpha)


def _all_filled_up(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute the result with rows and columns padded; a weight that is transposed in memory (`linear`) stays so."""
    columns = weight.shape[1]
    missing = -columns % COLUMNS
    wide = pad(weight.mT, (0, 0, 0, missing)).mT if weight.stride(0) == 1 else pad(weight, (0, missing))
    bias = None if bias is None else pad(bias, (0, missing))
    return _rows_filled_up(bias, rows, wide, beta, alpha)[: rows.shape[0], :columns].contiguous()


def _in_one_thread(way: Implementation) -> Implementation:
    """Return `way` as a function that runs with one thread and restores the number of threads afterwards."""

    @wraps(way)
    def alone(*args: Any) -> Tensor:
        threads = torch.get_num_threads()
        if threads == 1:
            return way(*args)
        torch.set_num_threads(1)
        try:
            return way(*args)
        finally:
            torch.set_num_threads(threads)

    return alone


@_in_one_thread
def _row_by_row(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Compute the result by its definition, one row at a time."""
    added = [None] * rows.shape[0] if bias is None else torch.split(bias, 1)
    parts = zip(added, torch.split(rows, 1), strict=True)
    return torch.cat([_all_filled_up(one, row, weight, beta, alpha) for one, row in parts])


FASTEST = (_as_it_is, _rows_filled_up, _all_filled_up)
WAYS = (*FASTEST, *map(_in_one_thread, FASTEST))
"""Ways to compute several rows, the fastest first; each returns contiguous rows, at least as many as it was given."""
ONE_ROW = (_repeated, _all_filled_up, _in_one_thread(_repeated))
"""Ways to compute a single row, the fastest first."""


def _of_equal_columns(weight: Tensor) -> Tensor:
    """Return a weight `[in, out]` whose columns all hold the same random numbers.

    It has the shape, strides and alignment of `weight`. The numbers are random and not 1, because products with 1 would
    not show whether products are rounded before they are added.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    place = weight.data_ptr() % ALIGNMENT // weight.element_size()
    column = torch.randn(weight.shape[0], 1, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    alike = weight.new_zeros(place + span).as_strided(weight.shape, weight.stride(), place)
    return alike.copy_(column.expand(weight.shape))


def _compare(
    way: Implementation, count: int, bias: Tensor | None, weight: Tensor, beta: float, alpha: float
) -> bool | None:  # fmt: skip
    """Compare a way with the definition on cancelling rows; see `same_bits` for the result.

    The sampled rows are repeated until they fill whole calls of `count` rows, so that every place in a call is
    compared. If there is a bias, one row of random numbers is added to all rows.
    """
    weight = _of_equal_columns(weight)  # so that every column cancels in each row
    sample = cancelling(SAMPLED_ROWS, weight)
    # The bias is as small as what remains of the sums: beside a larger one, bfloat16 would hide the order of the sum.
    drawn = None if bias is None else bias[0].clone().normal_(std=SMALL, generator=torch.Generator().manual_seed(0))

    def by(way: Implementation, rows: Tensor) -> Tensor:
        added = None if drawn is None else drawn.expand(len(rows), -1)
        return way(added, rows.clone(), weight, beta, alpha)[: len(rows)]

    expected = by(_row_by_row, sample)
    calls = -(-SAMPLED_ROWS // count)
    repeated = torch.arange(calls * count) % SAMPLED_ROWS
    found = [by(way, rows) for rows in torch.split(sample[repeated], count)]
    return same_bits(torch.cat(found), expected[repeated])
