"""`mm`, `addmm`, `mv`, `bmm` and `baddbmm` on CUDA: one kernel, one fixed tiling, whatever the number of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import constant_pad_nd as pad

from parity_audit.batch_invariant.batched import widened
from parity_audit.batch_invariant.cuda import kernels
from parity_audit.batch_invariant.cuda.launch import ELEMENTS, aligned, launch, widen
from parity_audit.core.errors import CannotRun

ROWS, COLUMNS, TERMS = 32, 64, 32
"""Rows and columns of the output tile of a program, and terms added per step.

They suit tensor cores of any generation and are not tuned for a particular one.
"""
DOUBLE_TILE = 16
"""Rows, columns and terms in float64; smaller, because a program then holds rows x terms x columns numbers at once."""


def mm(rows: Tensor, weight: Tensor) -> Tensor:
    """Return `[row, in]` times `[in, out]`."""
    return _product(aligned(rows)[None], weight[None], rows.dtype)[0]


def addmm(bias: Tensor, rows: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `beta * bias + alpha * rows @ weight`."""
    product = _product(aligned(rows)[None], weight[None], widened(rows.dtype))[0]
    return _added(bias, product, beta, alpha, rows.dtype)


def mv(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return `[row, in]` times `[in]`."""
    return mm(matrix, vector[:, None])[:, 0]


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """Return `[batch, row, term]` times `[batch, term, column]`."""
    return _batch(left, right, left.dtype)


def baddbmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `beta * added + alpha * left @ right`."""
    return _added(added, _batch(left, right, widened(left.dtype)), beta, alpha, left.dtype)


def _added(added: Tensor, product: Tensor, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """Return `beta * added + alpha * product` in `dtype`; if `beta` is 0, `added` is ignored, NaN included."""
    product = product if alpha == 1 else product * alpha
    return (product if beta == 0 else product + added * beta).to(dtype)


def _batch(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the batched product of two activations.

    Both factors are padded with zeros to multiples of `ELEMENTS`, so that all strides are such multiples whatever the number
    of queries and keys, and Triton uses the same compiled kernel.
    """
    transposed = right.stride(1) == 1 and right.stride(2) != 1
    missing = -left.shape[2] % ELEMENTS
    left = aligned(pad(left, (0, missing)))
    if transposed:
        right = aligned(pad(right.mT, (0, missing))).mT
    else:
        right = aligned(pad(right, (0, -right.shape[2] % ELEMENTS, 0, missing)))[:, :, : right.shape[2]]
    return _product(left, right, dtype)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Launch the kernel and return the product `[batch, row, column]` in `dtype`.

    The left factor must be contiguous; the right factor may have any strides.
    """
    if left.dtype != right.dtype or not left.is_floating_point():
        raise CannotRun(
            "no batch-invariant product of these tensors on CUDA", code="no-invariant-kernel",
            found=f"{left.dtype} times {right.dtype}", expected="two factors of one floating dtype",
        )  # fmt: skip
    batch, rows, terms = left.shape
    columns = right.shape[2]
    if not batch * rows * columns * terms:
        return left.new_zeros(batch, rows, columns, dtype=dtype)
    out = left.new_empty(batch, rows, columns, dtype=dtype)
    double = left.dtype == torch.float64
    tile = (DOUBLE_TILE,) * 3 if double else (ROWS, COLUMNS, TERMS)
    programs = batch * -(-rows // tile[0]) * -(-columns // tile[1])
    launch(
        kernels.product, (programs,), left, right, out, rows, columns, terms, rows * terms, terms, 1, *_strides(right),
        rows * columns, columns, ROWS=tile[0], COLUMNS=tile[1], TERMS=tile[2], WIDEN=widen(left.dtype), DOUBLE=double,
    )  # fmt: skip
    return out


def _strides(values: Tensor) -> list[int]:
    """Return the strides of the tensor, with 0 for dimensions of size 1, for which torch may report any stride."""
    return [stride if size > 1 else 0 for stride, size in zip(values.stride(), values.shape, strict=True)]
