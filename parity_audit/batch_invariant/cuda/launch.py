"""Launch the kernels on the device of their tensors, with a memory layout and compiler options that do not depend on the batch."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from parity_audit.batch_invariant.batched import LOW, widened

WARPS = 4
ALIGNMENT = 16
"""Bytes; Triton compiles a different kernel if a pointer is not a multiple of this number."""
ELEMENTS = 16
"""Elements; Triton compiles a different kernel if a stride is not a multiple of this number."""


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which can multiply bfloat16 only after a conversion to float32."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants, num_warps=WARPS, enable_fp_fusion=False)


def aligned(values: Tensor) -> Tensor:
    """Return the tensor in contiguous memory that starts at a multiple of `ALIGNMENT`; copied only if it is not there already."""
    if values.is_contiguous() and values.data_ptr() % ALIGNMENT == 0:
        return values
    return values.clone(memory_format=torch.contiguous_format)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32 or wider for floating point, else int64."""
    return widened(dtype) if dtype.is_floating_point else torch.int64


def widen(dtype: torch.dtype) -> bool:
    """Whether tiles have to be converted to float32 before they are multiplied, which only Triton's interpreter needs."""
    return dtype in LOW and interpreted()
