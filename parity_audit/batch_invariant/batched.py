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
LOW = (torch.bfloat16, torch.float16)


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """`[batch, row, term]` times `[batch, term, column]`."""
    if not left.is_floating_point() or not left.numel() or not right.numel():
        return torch.bmm(left, right, out=left.new_empty(*left.shape[:2], right.shape[2]))
    wide = widened(left.dtype)
    rows, columns = left.shape[1], right.shape[2]
    found = _product(_padded(left.to(wide), ROWS), _columns_padded(right.to(wide)))
    if found.shape != (left.shape[0], rows, columns):
        found = found[:, :rows, :columns].contiguous()
    return found.to(left.dtype)


def baddbmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`beta * added + alpha * left @ right`; with `beta` 0 whatever `added` holds is ignored."""
    product = bmm(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + added * beta


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are accumulated."""
    return torch.float32 if dtype in LOW else dtype


def _padded(values: Tensor, multiple: int) -> Tensor:
    """Contiguous, with rows of zeros up to a multiple."""
    missing = -values.shape[1] % multiple
    return pad(values, (0, 0, 0, missing)).contiguous() if missing else values.contiguous()


def _columns_padded(right: Tensor) -> Tensor:
    """Columns up to a multiple of `COLUMNS`; a transposed matrix (keys) stays transposed."""
    if right.stride(1) == 1 and right.stride(2) != 1:
        return _padded(right.mT, COLUMNS).mT
    missing = -right.shape[2] % COLUMNS
    return pad(right, (0, missing)).contiguous() if missing else right.contiguous()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """One call for each split where that has the bits of the tiles, else the tiles."""
    transposed = right.stride(1) == 1
    key = ("batch", left.shape, right.shape, transposed, left.dtype)
    ways = (_splits, _full_splits)
    way = chosen(key, ways, _all_tiles, lambda way: _compare(way, left.shape, right.shape, transposed, left.dtype))
    return way(left, right)


def _splits(left: Tensor, right: Tensor) -> Tensor:
    """All tiles at once, split by split; the last split as short as it is."""
    out = left.new_zeros(left.shape[0], left.shape[1], right.shape[2])
    for start in range(0, left.shape[2], SPLIT):
        out.baddbmm_(left[:, :, start : start + SPLIT], right[:, start : start + SPLIT])
    return out


def _full_splits(left: Tensor, right: Tensor) -> Tensor:
    """The same with the last split filled up."""
    return _splits(_padded(left.mT, SPLIT).mT.contiguous(), _padded(right, SPLIT))


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
    """The tiles in the corners of the first and of the last product of a random batch."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(left_shape, generator=generator, dtype=dtype)
    right = torch.randn(right_shape, generator=generator, dtype=dtype)
    right = right.mT.contiguous().mT if transposed else right
    out = way(left, right)
    corners = [
        (batch, row, column)
        for batch in {0, left_shape[0] - 1}
        for row in {0, left_shape[1] - ROWS}
        for column in {0, right_shape[2] - COLUMNS}
    ]
    found = [out[batch, row : row + ROWS, column : column + COLUMNS] for batch, row, column in corners]
    return same_bits(torch.stack(found), torch.stack([_tile(left, right, *corner) for corner in corners]))
