"""CUDA operations that raise an error: their sums depend on the batch or the order of threads, and there is no kernel for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity_audit.core.errors import CannotRun

REFUSED = (
    "mm.out", "mm.dtype", "mm.dtype_out", "addmm.out", "addmm.dtype", "addmm.dtype_out", "addmm_", "bmm.out", "bmm.dtype",
    "bmm.dtype_out", "baddbmm.out", "baddbmm.dtype", "baddbmm.dtype_out", "baddbmm_", "mv.out", "addmv", "addmv_", "addmv.out",
    "dot", "vdot", "addbmm", "addbmm_", "addbmm.out", "_scaled_mm", "_scaled_grouped_mm", "_grouped_mm", "_int_mm",
    "_weight_int8pack_mm", "_weight_int4pack_mm", "_addmm_activation", "convolution", "_softmax.out", "_log_softmax.out",
    "mean.out", "sum.IntList_out", "logsumexp.out", "cumsum", "cumsum_", "cumsum.out", "logcumsumexp", "cumprod", "prod",
    "prod.dim_int", "var.correction", "std.correction", "var_mean.correction", "std_mean.correction", "linalg_vector_norm",
    "norm.ScalarOpt_dim", "norm.Scalar", "native_group_norm", "nansum", "index_add", "index_add_", "index_add.out",
    "scatter_add", "scatter_add_", "scatter_add.out", "scatter_reduce.two", "scatter_reduce_.two", "index_reduce",
    "index_reduce_", "_embedding_bag", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_flash_attention_forward", "_efficient_attention_forward",
    "_cudnn_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
)  # fmt: skip


def no_kernel(name: str, *args: Any, **kwargs: Any) -> Any:
    """Raise the error for an operation without a kernel; only the `cumsum` of an integer tensor is computed and returned.

    The sum of integers is the same in any order.

    Raises:
        CannotRun: for every call except `cumsum` of an integer tensor without a `dtype` argument.
    """
    if name == "cumsum" and not args[0].is_floating_point() and not kwargs.get("dtype"):
        values: Tensor = args[0].to(torch.int64)
        later = torch.arange(values.shape[args[1]], device=values.device)
        return _running(values, args[1], later)
    raise CannotRun(
        f"`{name}` has no batch-invariant kernel for CUDA", code="no-invariant-kernel", found="a tensor on a CUDA device",
        hint="run the model on the CPU, or leave parity_audit.invariant()",
    )  # fmt: skip


def _running(values: Tensor, dim: int, place: Tensor) -> Tensor:
    """Return the cumulative sums of integers along `dim`: each entry is the sum of itself and all entries before it.

    `place` holds the indices along `dim`, from 0.
    """
    last = values.movedim(dim, -1)
    return torch.where(place <= place[:, None], last[..., None, :], 0).sum(-1).movedim(-1, dim).contiguous()


def refusals() -> dict[str, Callable[..., Any]]:
    """Return, by name, the functions that replace those operations of `REFUSED` that the installed torch has."""
    known: dict[str, Callable[..., Any]] = {}
    for name in REFUSED:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is not None and (overload or "default") in packet.overloads():
            known[name] = partial(no_kernel, name)
    return known
