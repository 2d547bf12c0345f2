"""Rows times a weight (`mm`, `addmm`, `mv`, and with them `linear`) on the CPU.

Definition: each row is the first of a block of `ROWS` rows, the others zero, times the weight with its columns filled up
to a multiple of `COLUMNS`. The shape of that call does not depend on how many rows there are, nor on the place of a row,
so neither do the bits; it is made in one thread, since libraries divide a product among threads in their own ways. Faster
calls are taken where they were found to give the same bits.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch import constant_pad_nd as pad

from parity_audit.batch_invariant.agreement import SAMPLED_ROWS, SMALL, Way, cancelling, chosen, same_bits

ROWS = 4
"""Rows in a block. Matrix libraries treat one to three rows differently from more; four cost little more than one."""
COLUMNS = 16
"""Columns: below this number, and in the rest of a division by it, matrix libraries use other kernels."""
ALIGNMENT = 64
"""Bytes, as torch allocates: libraries may sum rows that start elsewhere in another order."""


def times(left: Tensor, weight: Tensor) -> Tensor:
    """`[..., in]` times `[in, out]`, with all dimensions but the last as rows."""
    shape = (*left.shape[:-1], weight.shape[1])
    rows = left if left.dim() == 2 else left.reshape(-1, left.shape[-1])
    if not rows.is_floating_point():
        return torch.mm(rows, weight, out=rows.new_empty(rows.shape[0], weight.shape[1])).view(shape)
    return _product(None, rows, weight, 0, 1, shape)


def mm(rows: Tensor, weight: Tensor) -> Tensor:
    """`[row, in]` times `[in, out]`."""
    return times(rows, weight)


def addmm(bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * bias + alpha * rows @ weight`; the bias is one number, one row or a whole matrix."""
    shape = (rows.shape[0], weight.shape[1])
    if not rows.is_floating_point():
        return _as_it_is(bias.expand(shape), rows, weight, beta, alpha)
    return _product(bias.expand(shape), rows, weight, beta, alpha, shape)


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """`[row, in]` times `[in]`."""
    return mm(matrix, vector[:, None])[:, 0]


def _product(
    bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float, shape: tuple[int, ...]
) -> Tensor:
    """`beta * bias + alpha * rows @ weight` in a shape, by the first way that has the bits of the definition."""
    count, size = rows.shape
    if not count or not size or not weight.shape[1]:
        return _as_it_is(bias, rows, weight, beta, alpha).view(shape)
    place = weight.data_ptr() % ALIGNMENT
    # A library may take the factors into its sums, and then sums in another order.
    key = ("rows", count, weight.shape, weight.stride(), weight.dtype, place, bias is None, beta, alpha)
    way = chosen(
        key, ONE_ROW if count == 1 else WAYS, _row_by_row, lambda way: _compare(way, count, bias, weight, beta, alpha)
    )
    return way(bias, _aligned(rows), weight, beta, alpha).resize_(shape)  # forgets what was filled up


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


def _repeated(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """A single row, as every row of a block."""
    block = rows.expand(ROWS, -1)
    if bias is None:
        return rows.new_empty(ROWS, weight.shape[1]).addmm_(block, weight, beta=0)
    return _as_it_is(bias.expand(ROWS, -1), block, weight, beta, alpha)


def _rows_filled_up(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    more = (0, 0, 0, -rows.shape[0] % ROWS)
    bias = None if bias is None else pad(bias, more)
    return _as_it_is(bias, pad(rows, more), weight, beta, alpha)


def _all_filled_up(bias: Tensor | None, rows: Tensor, weight: Tensor, beta: float, alpha: float) -> Tensor:
    """Rows and columns; a transposed weight (that of `linear`) stays transposed."""
    columns = weight.shape[1]
    missing = -columns % COLUMNS
    wide = pad(weight.mT, (0, 0, 0, missing)).mT if weight.stride(0) == 1 else pad(weight, (0, missing))
    bias = None if bias is None else pad(bias, (0, missing))
    return _rows_filled_up(bias, rows, wide, beta, alpha)[: rows.shape[0], :columns].contiguous()


def _in_one_thread(way: Way) -> Way:
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
    """The definition."""
    added = [None] * rows.shape[0] if bias is None else torch.split(bias, 1)
    parts = zip(added, torch.split(rows, 1), strict=True)
    return torch.cat([_all_filled_up(one, row, weight, beta, alpha) for one, row in parts])


FASTEST = (_as_it_is, _rows_filled_up, _all_filled_up)
WAYS = (*FASTEST, *map(_in_one_thread, FASTEST))
"""From the fastest on. Each returns contiguous rows, at least as many as it was given."""
ONE_ROW = (_repeated, _all_filled_up, _in_one_thread(_repeated))


def _of_equal_columns(weight: Tensor) -> Tensor:
    """A weight `[in, out]` whose columns are all the same drawn numbers, with the strides of another one, and as far from where
    torch would allocate it. Products with 1 would not show whether they are rounded before they are added."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    place = weight.data_ptr() % ALIGNMENT // weight.element_size()
    column = torch.randn(weight.shape[0], 1, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    alike = weight.new_zeros(place + span).as_strided(weight.shape, weight.stride(), place)
    return alike.copy_(column.expand(weight.shape))


def _compare(
    way: Way, count: int, bias: Tensor | None, weight: Tensor, beta: float, alpha: float
) -> bool | None:  # fmt: skip
    """Cancelling rows at every place of calls for `count` rows against the same rows by the definition, beside one row of a bias."""
    weight = _of_equal_columns(weight)  # all cancel in the same rows
    sample = cancelling(SAMPLED_ROWS, weight)
    # A bias as small as what is left of the sums: beside a large one, bfloat16 shows no other order.
    drawn = None if bias is None else bias[0].clone().normal_(std=SMALL, generator=torch.Generator().manual_seed(0))

    def by(way: Way, rows: Tensor) -> Tensor:
        added = None if drawn is None else drawn.expand(len(rows), -1)
        return way(added, rows.clone(), weight, beta, alpha)[: len(rows)]

    expected = by(_row_by_row, sample)
    calls = -(-SAMPLED_ROWS // count)
    repeated = torch.arange(calls * count) % SAMPLED_ROWS
    found = [by(way, rows) for rows in torch.split(sample[repeated], count)]
    return same_bits(torch.cat(found), expected[repeated])
