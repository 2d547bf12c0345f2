"""The judge: run a model in *true* float64.

`model.double()` is not enough: transformers casts to float32 inside RMSNorm, softmax and rotary embedding, so that such a
"float64" model still has more than a third of the float32 error. Here a `TorchFunctionMode` turns these casts into casts to
float64. Values that the reference *defines* in float32 (`inv_freq`) are converted to float64 without being recomputed.

The weights of a module are promoted to float64 only while the module runs, and those of large products one block at a time, so
the model needs about as much memory as in its native dtype. Promotion is exact and so is its reversal, because float64 holds
every float32, float16 and bfloat16 number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity_audit.backends.offload import keeps

LOW = (torch.float32, torch.float16, torch.bfloat16)
DOWNCASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


PLAIN = (nn.Linear, nn.Embedding)
"""Modules whose forward only calls `F.linear` or `F.embedding`, where `_Promote` promotes the weight or the result.

Their weights therefore stay in their own dtype. Modules whose weights are offloaded are an exception: the hook that brings a
weight casts it to the dtype of the module's parameter, so that parameter has to be float64."""
BLOCK_NUMBERS = 1 << 20
"""Number of weights that are promoted at a time: 8 MiB in float64, which stay in the processor's cache until they are used."""
GROUPED = {getattr(holder, name, None) for holder, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))} - {None}
TAKE_LOW = {F.embedding, F.linear, *GROUPED}
"""Functions that get a weight in its own dtype. `_Promote` still makes their result float64."""


FLOAT32_ALONE = "reorder_and_upcast_attn"
"""Setting of attention modules of transformers' GPT-2: compute scores and softmax in float32, whatever the model's dtype.

That code refuses scores of any other dtype, so the judge switches the setting off. The function computed is the same without."""


class _Promote(TorchFunctionMode):
    """Turns every cast to a lower float dtype, and every such `dtype` argument, into float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DOWNCASTS:
            return args[0].double()
        if func not in TAKE_LOW and func.__name__ != "__get__":
            args = tuple(_whole(arg) for arg in args)
        args = tuple(_raised(arg) for arg in args)
        kwargs = {key: _raised(value) for key, value in kwargs.items()}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in GROUPED:
            return _grouped(*args, **kwargs)
        result = func(*args, **kwargs)
        return result.double() if func is F.embedding else result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` in float64, promoting a weight `[out, in]` of a lower dtype one block of outputs at a time."""
    if weight.dtype not in LOW:
        return F.linear(input, weight, bias)
    height = max(1, BLOCK_NUMBERS // weight.shape[1])
    if bias is not None:
        bias = bias.double()
    if height >= len(weight):
        return F.linear(input, weight.double(), bias)
    parts = [F.linear(input, block.double()) for block in weight.split(height)]
    return torch.cat(parts, dim=-1) if bias is None else torch.cat(parts, dim=-1) + bias


def _grouped(rows: Tensor, weights: Tensor, *, offs: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """Compute `[row, in]` times `[group, in, out]` in float64, because torch's kernel does not support it.

    The rows from `offs[g - 1]` (0 for the first group) to `offs[g]` are multiplied by the weight of group g.
    """
    out = rows.new_zeros(len(rows), weights.shape[-1], dtype=torch.float64)
    start = 0
    for group, stop in enumerate(offs.tolist()):
        out[start:stop] = rows[start:stop].double() @ weights[group].double()
        start = stop
    return out if bias is None else out + bias.double()


def _whole(value: Any) -> Any:
    """Return a float64 copy of a parameter of a lower dtype, and any other value unchanged.

    It serves functions outside `TAKE_LOW` that use a weight which was left in its own dtype.
    """
    return value.double() if isinstance(value, nn.Parameter) and value.dtype in LOW else value


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


@contextmanager
def promoted(root: nn.Module) -> Iterator[None]:
    """Run `root` in true float64 inside this context; afterwards its weights are as before."""
    with ExitStack() as stack:
        for module in root.modules():
            if getattr(module, FLOAT32_ALONE, False):
                setattr(module, FLOAT32_ALONE, False)
                stack.callback(setattr, module, FLOAT32_ALONE, True)
            left = () if keeps(module) else _left_as_stored(module)
            if {*module._parameters, *module._buffers} - set(left):
                stack.enter_context(_promoted_while_running(module, left))
        stack.enter_context(_default_dtype(torch.float64))
        stack.enter_context(_Promote())
        yield


def _left_as_stored(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's tensors that keep their own dtype while it runs.

    These are all parameters of a plain module (`PLAIN`), and the table of a subclass of `Embedding`: it is read by `F.embedding`
    too, and a float64 copy of it would be the largest tensor of the model.
    """
    if type(module) in PLAIN:
        return tuple(module._parameters)
    return ("weight",) if isinstance(module, nn.Embedding) else ()


@contextmanager
def _promoted_while_running(module: nn.Module, left: Collection[str] = ()) -> Iterator[None]:
    """While the module's forward runs, replace its own float tensors by float64 copies, except for those named in `left`."""
    kept: list[tuple[dict[str, Any], str, Any]] = []

    def before(*_: Any) -> None:
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, value in store.items():
                if name not in left and isinstance(value, Tensor) and value.dtype in LOW:
                    kept.append((store, name, value))
                    store[name] = _copy(value)

    def after(*_: Any) -> None:
        while kept:
            store, name, value = kept.pop()
            store[name] = value

    handles = [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]
    try:
        yield
    finally:
        after()
        for handle in handles:
            handle.remove()


def _copy(value: Tensor) -> Tensor:
    raised = value.detach().double()
    return nn.Parameter(raised, requires_grad=False) if isinstance(value, nn.Parameter) else raised


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
