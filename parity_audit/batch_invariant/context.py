"""`invariant()`: replaces kernels in torch's dispatcher, and gives them back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from parity_audit.batch_invariant import batched, composites, products, rows
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


def _not_on_cuda(*args: Any, **kwargs: Any) -> Any:
    raise CannotRun(
        "batch-invariant kernels exist for the CPU only", code="no-invariant-kernel", found="a tensor on a CUDA device",
        hint="run the model on the CPU, or leave parity_audit.invariant()",
    )  # fmt: skip


CUDA: Kernels = dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_softmax", "_log_softmax", "mean.dim"), _not_on_cuda)

_lock = threading.Lock()
_open = 0
_library: Any = None


@contextmanager
def invariant() -> Iterator[None]:
    """Make torch models batch-invariant, bit for bit, while this context is open; the models stay as they are.

    Kernels belong to the process: other threads compute invariantly too until the last context that is open anywhere is
    left. Contexts nest. What `torch.compile` generated is not changed.

    Raises:
        CannotRun: a product, softmax or mean of CUDA tensors, inside the context: there are no kernels for them yet.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


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
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():  # torch warns that kernels are replaced, which is what is wanted
            warnings.simplefilter("ignore", UserWarning)
            for key, kernels in (("CompositeImplicitAutograd", COMPOSITE), ("CPU", CPU), ("CUDA", CUDA)):
                for name, kernel in kernels.items():
                    library.impl(name, kernel, key)
    except BaseException:
        library._destroy()
        raise
    return library
