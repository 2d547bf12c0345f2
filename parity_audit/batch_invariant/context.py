"""`invariant()`: replaces kernels in torch's dispatcher, and gives them back."""

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
"""Functions of `batch_invariant.cuda` by the operation that they replace."""


def _on_cuda(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """A kernel written in Triton, imported when the first CUDA tensor asks for it.

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
    """What is replaced on CUDA: kernels, and errors where there are none."""
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
    """Make torch models batch-invariant, bit for bit, while this context is open; the models stay as they are.

    Kernels belong to the process: other threads compute invariantly too until the last context that is open anywhere is
    left. Contexts nest. What `torch.compile` generated is not changed.

    Raises:
        CannotRun: inside the context, an operation on CUDA tensors whose bits depend on the batch and that has no kernel.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def is_open() -> bool:
    """Whether the kernels are replaced in this process now."""
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
    """The kernels, in force; all of them or none."""
    library: Any = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():  # torch warns that kernels are replaced, which is what is wanted
            warnings.simplefilter("ignore", UserWarning)
            for key, kernels in (("CompositeImplicitAutograd", COMPOSITE), ("CPU", CPU), ("CUDA", cuda_kernels())):
                for name, kernel in kernels.items():
                    library.impl(name, kernel, key)
    except BaseException:
        library._destroy()
        raise
    return library
