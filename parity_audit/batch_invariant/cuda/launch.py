"""How the kernels are started: where tensors are, and without what a compiler may fuse."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from parity_audit.batch_invariant.batched import LOW, widened

WARPS = 4
ALIGNMENT = 16
"""Bytes: Triton compiles another kernel for pointers and strides that are no multiples of it."""
ELEMENTS = 16
"""Numbers: the same for strides."""


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which multiplies bfloat16 only after it was widened."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants, num_warps=WARPS, enable_fp_fusion=False)


def aligned(values: Tensor) -> Tensor:
    """Contiguous and where torch would allocate it."""
    if values.is_contiguous() and values.data_ptr() % ALIGNMENT == 0:
        return values
    return values.clone(memory_format=torch.contiguous_format)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32 or wider, int64 for whole numbers."""
    return widened(dtype) if dtype.is_floating_point else torch.int64


def widen(dtype: torch.dtype) -> bool:
    """Whether tiles have to be widened before they are multiplied."""
    return dtype in LOW and interpreted()
