"""Batches of products of two activations (`bmm`, `baddbmm`) on the CPU, as eager and sdpa attention use them.

The number of rows (queries), of columns (keys, or the head's width) and of summed terms (the head's width, or keys) may
all vary. The result is defined as follows: outputs are computed in tiles of `ROWS` x `COLUMNS`. Each tile is summed in
splits of `SPLIT` terms, one split after the other from the first on, in float32 or wider. Incomplete tiles and splits
are padded with zeros. A split has a fixed size, so more keys mean more splits, and the order of the earlier terms stays
the same. Masked keys add exact zeros, also at the end of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import constant_pad_nd as pad

from parity_audit.batch_invariant.agreement import Implementation, chosen, same_bits

ROWS = 4
COLUMNS = 16
"""Rows and columns of a tile: for smaller sizes matrix libraries use other kernels."""
SPLIT = 128
"""Terms summed by one call: a head's width or half of it, so that few calls and little padding are needed."""
TERMS = 16
"""The number of terms is padded with zeros to a multiple of this number.

Decoding then reaches a new shape, for which calls have to be compared, only once in this many steps.
"""
LOW = (torch.bfloat16, torch.float16)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """Return `[batch, row, term]` times `[batch, term, column]` as a contiguous tensor."""
    return times(left, right).contiguous()


def times(left: Tensor, right: Tensor) -> Tensor:
    """Return the same product as `bmm`, possibly as a view of a larger tensor."""
    if not left.is_floating_point() or not left.numel() or not right.numel():
        return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[2]))
    dtype, rows, columns = left.dtype, left.shape[1], right.shape[2]
    if dtype in LOW:
        left, right = left.float(), right.float()
    terms = -left.shape[2] % TERMS
    found = _product(_filled_up(left, -rows % ROWS, terms), _right_filled_up(right, terms))
    if found.shape[1] != rows:
        found = found.narrow(1, 0, rows)
    if found.shape[2] != columns:
        found = found.narrow(2, 0, columns)
    return found.to(dtype) if dtype in LOW else found


def baddbmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `beta * added + alpha * left @ right`; if `beta` is 0, `added` is ignored, NaN included."""
    product = bmm(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + added * beta


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are accumulated: float32 for 16-bit dtypes, else the dtype itself."""
    return torch.float32 if dtype in LOW else dtype


def _filled_up(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return `values` as a contiguous tensor with `rows` rows and `columns` columns of zeros added."""
    return pad(values, (0, columns, 0, rows)) if rows or columns else values.contiguous()


def _right_filled_up(right: Tensor, terms: int) -> Tensor:
    """Return `right` with `terms` more terms, and columns padded to a multiple of `COLUMNS`.

    A matrix that is transposed in memory (keys) stays transposed.
    """
    columns = -right.shape[2] % COLUMNS
    if right.stride(1) == 1 and right.stride(2) != 1:
        return _filled_up(right.mT, columns, terms).mT
    return _filled_up(right, terms, columns)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product, computed with one call per split if that gives the bits of the tiles, else by tiles."""
    transposed = right.stride(1) == 1
    key = ("batch", left.shape, right.shape, transposed, left.dtype)
    way = chosen(key, WAYS, _all_tiles, lambda way: _compare(way, left.shape, right.shape, transposed, left.dtype))
    return way(left, right)


def _splits(left: Tensor, right: Tensor) -> Tensor:
    """Compute all tiles in one call for each split; the last split is not padded."""
    batches, rows, terms = left.shape
    out = left.new_empty(batches, rows, right.shape[2])
    if terms <= SPLIT:
        return torch.bmm(left, right, out=out)
    torch.bmm(left[:, :, :SPLIT], right[:, :SPLIT], out=out)
    for start in range(SPLIT, terms, SPLIT):
        out.baddbmm_(left[:, :, start : start + SPLIT], right[:, start : start + SPLIT])
    return out


def _full_splits(left: Tensor, right: Tensor) -> Tensor:
    """Compute the same with the last split padded with zeros, and both factors copied to contiguous tensors."""
    terms = -left.shape[2] % SPLIT
    return _splits(pad(left, (0, terms)).contiguous(), pad(right, (0, 0, 0, terms)).contiguous())


WAYS = (_splits, _full_splits)


def _all_tiles(left: Tensor, right: Tensor) -> Tensor:
    """Compute the product by its definition, one tile after the other."""
    batches, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    out = left.new_zeros(batches, rows, columns)
    for batch in range(batches):
        for row in range(0, rows, ROWS):
            for column in range(0, columns, COLUMNS):
                out[batch, row : row + ROWS, column : column + COLUMNS] = _tile(left, right, batch, row, column)
    return out


def _tile(left: Tensor, right: Tensor, batch: int, row: int, column: int) -> Tensor:
    """Compute one tile by the definition, where each split is a product of `[ROWS, SPLIT]` and `[SPLIT, COLUMNS]`."""
    out = left.new_zeros(ROWS, COLUMNS)
    for start in range(0, left.shape[2], SPLIT):
        a = left[batch, row : row + ROWS, start : start + SPLIT]
        b = right[batch, start : start + SPLIT, column : column + COLUMNS]
        missing = SPLIT - a.shape[1]
        out.addmm_(
            pad(a, (0, missing)).contiguous(),
            pad(b, (0, 0, 0, missing)).contiguous(),
        )
    return out


def _compare(
    way: Implementation, left_shape: Any, right_shape: Any, transposed: bool, dtype: torch.dtype
) -> bool | None:
    """Compare a way with the definition on a batch of equal random products; see `same_bits` for the result.

    Compared are the tiles in the corners of the first and the last product of the batch.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randn(shape[1:], generator=generator, dtype=dtype).expand(shape).contiguous()
        for shape in (left_shape, right_shape)
    )
    right = right.mT.contiguous().mT if transposed else right
    out = way(left, right)
    corners = [(row, column) for row in {0, left_shape[1] - ROWS} for column in {0, right_shape[2] - COLUMNS}]
    found = [out[batch, row : row + ROWS, column : column + COLUMNS] for batch in (0, -1) for row, column in corners]
    expected = [_tile(left, right, 0, *corner) for corner in corners]
    return same_bits(torch.stack(found), torch.stack([*expected, *expected]))
