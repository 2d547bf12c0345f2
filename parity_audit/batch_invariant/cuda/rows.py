"""Sums along rows on CUDA (`softmax`, `log_softmax`, `logsumexp`, `mean`, `sum`, norms): one program per row, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from parity_audit.batch_invariant.cuda import kernels
from parity_audit.batch_invariant.cuda.launch import accumulated, aligned, launch
from parity_audit.core.errors import CannotRun

BLOCK = 1024
"""Numbers that a program reads and sums at once; an incomplete last block is filled with numbers that add nothing."""


def softmax(scores: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Return the softmax along `dim` (torch operation `_softmax`)."""
    return _softmax(scores, dim, half_to_float, log=False)


def log_softmax(values: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """Return the logarithm of the softmax along `dim` (torch operation `_log_softmax`)."""
    return _softmax(values, dim, half_to_float, log=True)


def _softmax(values: Tensor, dim: int, half_to_float: bool, *, log: bool) -> Tensor:
    dtype = torch.float32 if half_to_float else values.dtype
    if values.dim() == 0 or not values.numel():
        return torch.zeros_like(values, dtype=dtype) if log else torch.ones_like(values, dtype=dtype)
    last = aligned(values.movedim(dim, -1))
    out = torch.empty_like(last, dtype=dtype)
    width = last.shape[-1]
    wide = tl.float64 if values.dtype == torch.float64 else tl.float32
    launch(
        kernels.row_softmax, (last.numel() // width,), last, out, width, LOG=log, WIDE=wide, BLOCK=BLOCK
    )  # fmt: skip
    return out.movedim(-1, dim).contiguous()


def total(
    values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum along any dimensions (torch operation `sum.dim_IntList`), which are moved to the end first."""
    exact = not values.is_floating_point()
    return _sums(values, dim, keepdim).to(dtype or (torch.int64 if exact else values.dtype))


def mean(
    values: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the mean along any dimensions (torch operation `mean.dim`)."""
    values = values if dtype is None else values.to(dtype)
    sums = _sums(values, dim, keepdim)
    return (sums / (values.numel() / max(1, sums.numel()))).to(values.dtype)


def logsumexp(values: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return `log(sum(exp(values)))` along `dim` (torch operation `logsumexp`), computed as maximum plus log of a sum."""
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    peak = values.amax(tuple(dim), keepdim=True)
    peak = torch.where(peak.isinf(), torch.zeros_like(peak), peak)
    found = total((values - peak).exp(), dim, True).log() + peak
    return found if keepdim else found.squeeze(tuple(dim))


def _sums(values: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    """Return the sums in the dtype in which they are accumulated: float32 or wider, or int64."""
    if values.is_complex():
        raise CannotRun("no batch-invariant sum of complex numbers on CUDA", code="no-invariant-kernel")
    every = range(values.dim())
    summed = sorted({one % values.dim() for one in dim}) if dim else list(every)
    kept = [one for one in every if one not in summed]
    shape = [values.shape[one] for one in kept]
    rows = aligned(values.permute(*kept, *summed)) if values.dim() else aligned(values)
    out = values.new_zeros(shape, dtype=accumulated(values.dtype))
    if rows.numel():
        launch(kernels.row_sum, (out.numel(),), rows, out, rows.numel() // out.numel(), BLOCK=BLOCK)
    return out.view([1 if one in summed else values.shape[one] for one in every]) if keepdim else out


def rms_norm(values: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the normed rows and `1 / sqrt(mean square + eps)` of each (torch operation `_fused_rms_norm`)."""
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    out, _, rstd = _normed(values, shape, weight, None, eps, centred=False)
    return out, rstd


def layer_norm(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed rows, and the mean and `1 / sqrt(variance + eps)` of each (torch operation `native_layer_norm`)."""
    return _normed(values, shape, weight, bias, eps, centred=True)


def _normed(
    values: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    width = math.prod(shape)
    rows = aligned(values)
    out = torch.empty_like(rows)
    outside = values.shape[: values.dim() - len(shape)]
    mean, rstd = (values.new_zeros(outside, dtype=accumulated(values.dtype)) for _ in range(2))
    w, b = (rows if one is None else aligned(one) for one in (weight, bias))
    if rows.numel():
        launch(
            kernels.row_norm, (rows.numel() // width,), rows, w, b, out, mean, rstd, width, float(eps), CENTRED=centred,
            WEIGHT=weight is not None, BIAS=bias is not None, BLOCK=BLOCK,
        )  # fmt: skip
    short = (*outside, *(1 for _ in shape))
    return out, mean.view(short), rstd.view(short)
