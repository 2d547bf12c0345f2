"""`invariant()`: replace kernels in torch's dispatcher while a context is open, and restore them afterwards."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from parity_audit.batch_invariant import batched, composites, products, rows
from parity_audit.batch_invariant.cuda.refused import refusals
from parity_audit.batch_invariant.elementwise import FUNCTIONS, pointwise
from parity_audit.core.errors import CannotRun

Kernels = Mapping[str, Callable[..., Any]]
COMPOSITE: Kernels = {"matmul": composites.matmul, "scaled_dot_product_attention": composites.attention}
CPU: Kernels = {
    "mm": products.mm,
    "addmm": products.addmm,
    "mv": products.mv,
    "bmm": batched.bmm,
    "baddbmm": batched.baddbmm,
    "_softmax": rows.softmax,
    "_log_softmax": rows.log_softmax,
    "logsumexp": rows.logsumexp,
    "mean.dim": rows.mean,
    "sum.dim_IntList": rows.total,
    **{name: partial(pointwise, getattr(torch.ops.aten, name).out) for name in FUNCTIONS},
}


CUDA_KERNELS = {
    "products": {name: name for name in ("mm", "addmm", "mv", "bmm", "baddbmm")},
    "rows": {
        "_softmax": "softmax", "_log_softmax": "log_softmax", "logsumexp": "logsumexp", "mean.dim": "mean",
        "sum.dim_IntList": "total", "native_layer_norm": "layer_norm", "_fused_rms_norm": "rms_norm",
    },
}  # fmt: skip
"""Functions of each module of `batch_invariant.cuda`, by the operation that they replace."""


def _on_cuda(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel written in Triton, which is imported when it is needed for the first time.

    Raises:
        CannotRun: Triton is not installed.
    """
    try:
        found = importlib.import_module(f"parity_audit.batch_invariant.cuda.{module}")
    except ModuleNotFoundError as error:
        raise CannotRun(
            "batch-invariant kernels for CUDA need Triton", code="no-invariant-kernel", found=str(error),
            hint="install the triton that belongs to this torch, or run the model on the CPU",
        ) from error  # fmt: skip
    return getattr(found, function)(*args, **kwargs)


def cuda_kernels() -> dict[str, Callable[..., Any]]:
    """Return what replaces operations on CUDA: a kernel, or a function that raises if there is no invariant kernel."""
    own = {
        name: partial(_on_cuda, module, function)
        for module, functions in CUDA_KERNELS.items()
        for name, function in functions.items()
        if hasattr(torch.ops.aten, name.partition(".")[0])
    }
    return {**refusals(), **own}


_lock = threading.Lock()
_open = 0
_library: Any = None


@contextmanager
def invariant() -> Iterator[None]:
    """Make torch models batch-invariant, bit for bit, while this context is open; the models are not changed.

    Kernels are replaced for the whole process. Other threads therefore compute invariantly too, until the last open
    context of any thread is left. Contexts can be nested. Code that `torch.compile` generated is not changed.

    Raises:
        CannotRun: raised inside the context by an operation on CUDA tensors whose bits depend on the batch and for
            which there is no batch-invariant kernel.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def is_open() -> bool:
    """Whether the kernels of this process are replaced at the moment."""
    return _library is not None


def _enter() -> None:
    global _open, _library
    with _lock:
        if _open == 0:
            _library = _registered()
        _open += 1


def _leave() -> None:
    global _open, _library
    with _lock:
        _open -= 1
        if _open == 0:
            _library._destroy()
            _library = None


def _registered() -> Any:
    """Register all kernels and return their library; if one cannot be registered, remove the others and raise."""
    library: Any = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():  # torch warns about replaced kernels, which is intended
            warnings.simplefilter("ignore", UserWarning)
            for key, kernels in (("CompositeImplicitAutograd", COMPOSITE), ("CPU", CPU), ("CUDA", cuda_kernels())):
                for name, kernel in kernels.items():
                    library.impl(name, kernel, key)
    except BaseException:
        library._destroy()
        raise
    return library
