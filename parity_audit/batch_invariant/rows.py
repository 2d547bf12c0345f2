"""Sums along a row (`softmax`, `log_softmax`, `logsumexp`, `mean`, `sum`, norms) on the CPU, each in one fixed order.

Along a last dimension of fixed size, torch sums each row by itself if there are at least two rows in contiguous memory.
It divides a single long row among threads, so a single row is computed together with a copy of itself. The width of
attention's softmax grows with the number of keys. It is therefore summed in blocks of `BLOCK` keys, padded with zeros,
one block after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity_audit.batch_invariant.agreement import SAMPLED_ROWS, Implementation, cancelling, chosen, same_bits
from parity_audit.batch_invariant.batched import LOW
from parity_audit.batch_invariant.elementwise import GRAIN, pointwise

BLOCK = 64
"""Keys in a block of the softmax's sum."""
Native = Callable[..., Tensor]
aten = torch.ops.aten
exp = partial(pointwise, aten.exp.out)


def softmax(scores: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Compute `_softmax` along any dimension, in float32 or wider."""
    dtype = torch.float32 if half_to_float else scores.dtype
    if scores.dim() == 0 or scores.numel() == 0:
        return torch.ones_like(scores, dtype=dtype)
    inner = dim not in (-1, scores.dim() - 1)
    last = scores.movedim(dim, -1) if inner else scores
    width = last.shape[-1]
    rows = torch.constant_pad_nd(last, (0, -width % BLOCK), -math.inf)
    rows = rows if scores.dtype not in LOW else rows.float()
    rows = exp(rows.sub_(rows.amax(-1, keepdim=True)))
    if width > BLOCK:
        sums = _last(torch.sum, rows.view(*rows.shape[:-1], -1, BLOCK), keepdim=False).cumsum(-1)[..., -1:]
    else:
        sums = _last(torch.sum, rows, keepdim=True)
    found = (rows[..., :width] if width % BLOCK else rows).div(sums)
    found = found if found.dtype == dtype else found.to(dtype)
    return found.movedim(-1, dim).contiguous() if inner else found


def log_softmax(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Compute `_log_softmax` along any dimension."""
    last = values.movedim(dim, -1) if values.dim() else values
    rows = _two_rows(last)
    out = torch.empty_like(rows, dtype=torch.float32 if half_to_float else values.dtype)
    aten._log_softmax.out(rows, -1, half_to_float, out=out)
    found = out[: max(1, last.numel() // max(1, last.shape[-1] if last.dim() else 1))].reshape(last.shape)
    return (found.movedim(-1, dim) if values.dim() else found).contiguous()


def mean(values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Compute `mean.dim`."""
    return _reduced(torch.mean, values if dtype is None else values.to(dtype), dim, keepdim)


def total(values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Compute `sum.dim_IntList`."""
    if dtype is None and not (values.is_floating_point() or values.is_complex()):
        dtype = torch.int64
    return _reduced(torch.sum, values if dtype is None else values.to(dtype), dim, keepdim)


def logsumexp(values: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Compute `logsumexp` from a maximum, exponentials, a sum and a logarithm."""
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    peak = values.amax(tuple(dim), keepdim=True)
    peak = torch.where(peak.isinf(), torch.zeros_like(peak), peak)
    sums = _reduced(torch.sum, exp(values - peak), dim, True)
    found = pointwise(aten.log.out, sums) + peak
    return found if keepdim else found.squeeze(tuple(dim))


def _reduced(native: Native, values: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Reduce along the last dimension row by row in a fixed order; leave any other reduction to torch."""
    if dim is not None and len(dim) == 1 and values.dim() and dim[0] % values.dim() == values.dim() - 1:
        return _last(native, values, keepdim)
    return _native(native, values, dim, keepdim)


def _last(native: Native, values: Tensor, keepdim: bool) -> Tensor:
    """Reduce along the last dimension row by row.

    Several rows in contiguous memory are reduced by one call of torch. A single row is reduced alone if a comparison
    has shown that this gives the same bits, and together with a copy of itself otherwise.
    """
    if values.is_contiguous() and values.numel() > values.shape[-1] > 0:
        return _as_it_is(native, values, keepdim)
    if values.is_floating_point() and 0 < values.numel() == values.shape[-1] <= GRAIN:
        key = ("one row", native, values.numel(), values.dtype)
        return chosen(key, (_as_it_is,), _doubled, lambda way: _compare(way, native, values))(native, values, keepdim)
    return _doubled(native, values, keepdim)


def _as_it_is(native: Native, values: Tensor, keepdim: bool) -> Tensor:
    """Reduce along the last dimension with one call of torch."""
    return native(values, -1, keepdim, out=values.new_empty(0))


def _doubled(native: Native, values: Tensor, keepdim: bool) -> Tensor:
    """Reduce along the last dimension; a single row is computed together with a copy of itself."""
    rows = _two_rows(values)
    out = _as_it_is(native, rows, False)
    shape = (*values.shape[:-1], 1) if keepdim else values.shape[:-1]
    return out[: math.prod(shape)].view(shape)


def _compare(way: Implementation, native: Native, values: Tensor) -> bool | None:
    """Compare a way with `_doubled` on cancelling rows of this width, each row alone; see `same_bits` for the result."""
    rows = cancelling(SAMPLED_ROWS, values.new_ones(values.shape[-1], 1))
    shape = values.shape
    found, expected = (torch.stack([one(native, row.view(shape), True) for row in rows]) for one in (way, _doubled))
    return same_bits(found, expected)


def _two_rows(values: Tensor) -> Tensor:
    """Return `values` as a contiguous `[row, width]` with at least two rows; a single row is repeated."""
    width = values.shape[-1] if values.dim() else 1
    rows = (
        values.contiguous().view(-1, width) if values.numel() else values.reshape(math.prod(values.shape[:-1]), width)
    )
    return rows.expand(2, -1).contiguous() if len(rows) == 1 else rows


def _native(native: Native, values: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    out = values.new_empty(0)
    native(values, None if dim is None else list(dim), keepdim, out=out)
    return out
