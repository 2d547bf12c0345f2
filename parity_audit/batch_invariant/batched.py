"""Batches of products of two activations (`bmm`, `baddbmm`) on the CPU: attention, eager and sdpa.

Rows (queries), columns (keys, or the head's width) and the summed dimension (the head's width, or keys) all may vary.
Definition: tiles of `ROWS` x `COLUMNS` outputs, summed in splits of `SPLIT` terms from the first on, one after the
other, in float32 or wider; whatever a tile or split lacks is filled up with zeros. A split has a fixed size, so their
number grows with the keys and the order of the terms stays. Masked keys add exact zeros, at the end of a sum too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import constant_pad_nd as pad

from parity_audit.batch_invariant.agreement import Way, chosen, same_bits

ROWS = 4
COLUMNS = 16
"""Outputs of a tile: below these sizes matrix libraries go over to other kernels."""
SPLIT = 128
"""Terms summed by one call: a head's width or half of it, so that few calls are needed, and little is filled up."""
TERMS = 16
"""Terms up to a multiple of this number are filled up with zeros, so that decoding meets a new shape, and compares calls for
it, once in so many steps."""
LOW = (torch.bfloat16, torch.float16)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """`[batch, row, term]` times `[batch, term, column]`."""
    return times(left, right).contiguous()


def times(left: Tensor, right: Tensor) -> Tensor:
    """The same; what is returned may be a part of a larger tensor."""
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
    """`beta * added + alpha * left @ right`; with `beta` 0 whatever `added` holds is ignored."""
    product = bmm(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + added * beta


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float32 if dtype in LOW else dtype


def _filled_up(values: Tensor, rows: int, columns: int) -> Tensor:
    """Contiguous, with so many rows and columns of zeros more."""
    return pad(values, (0, columns, 0, rows)) if rows or columns else values.contiguous()


def _right_filled_up(right: Tensor, terms: int) -> Tensor:
    """Columns up to a multiple of `COLUMNS`; a transposed matrix (keys) stays transposed."""
    columns = -right.shape[2] % COLUMNS
    if right.stride(1) == 1 and right.stride(2) != 1:
        return _filled_up(right.mT, columns, terms).mT
    return _filled_up(right, terms, columns)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """One call for each split where that has the bits of the tiles, else the tiles."""
    transposed = right.stride(1) == 1
    key = ("batch", left.shape, right.shape, transposed, left.dtype)
    way = chosen(key, WAYS, _all_tiles, lambda way: _compare(way, left.shape, right.shape, transposed, left.dtype))
    return way(left, right)


def _splits(left: Tensor, right: Tensor) -> Tensor:
    """All tiles at once, split by split; the last split as short as it is."""
    batches, rows, terms = left.shape
    out = left.new_empty(batches, rows, right.shape[2])
    if terms <= SPLIT:
        return torch.bmm(left, right, out=out)
    torch.bmm(left[:, :, :SPLIT], right[:, :SPLIT], out=out)
    for start in range(SPLIT, terms, SPLIT):
        out.baddbmm_(left[:, :, start : start + SPLIT], right[:, start : start + SPLIT])
    return out


def _full_splits(left: Tensor, right: Tensor) -> Tensor:
    """The same with the last split filled up, and both factors laid out for it."""
    terms = -left.shape[2] % SPLIT
    return _splits(pad(left, (0, terms)).contiguous(), pad(right, (0, 0, 0, terms)).contiguous())


WAYS = (_splits, _full_splits)


def _all_tiles(left: Tensor, right: Tensor) -> Tensor:
    batches, rows, columns = left.shape[0], left.shape[1], right.shape[2]
    out = left.new_zeros(batches, rows, columns)
    for batch in range(batches):
        for row in range(0, rows, ROWS):
            for column in range(0, columns, COLUMNS):
                out[batch, row : row + ROWS, column : column + COLUMNS] = _tile(left, right, batch, row, column)
    return out


def _tile(left: Tensor, right: Tensor, batch: int, row: int, column: int) -> Tensor:
    """One tile by the definition: each split a product of `[ROWS, SPLIT]` and `[SPLIT, COLUMNS]`."""
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


def _compare(way: Way, left_shape: Any, right_shape: Any, transposed: bool, dtype: torch.dtype) -> bool | None:
    """The tiles in the corners of the first and of the last of a batch of equal random products."""
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
