"""The judge: a model in *true* float64.

`model.double()` is not that: transformers casts to float32 inside RMSNorm, softmax and rotary, which leaves
the "float64" model off by more than a third of the float32 error. Here a `TorchFunctionMode` turns those
casts into float64 ones. Values that the reference *defines* in float32 (`inv_freq`) stay those values.

Weights are promoted module by module while that module runs, and those of large products a block at a time,
so memory stays that of the native model. The way there and back is exact: float64 holds every float32,
float16 and bfloat16 number.
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
"""Modules that only call a function of which `_Promote` promotes the weight, or its result; one whose hook brings it casts it
to the dtype that it has, and leaves it in that."""
BLOCK_NUMBERS = 1 << 20
"""Promoted at a time: 8 MiB, which stay in the cache until they are used."""
GROUPED = {getattr(holder, name, None) for holder, name in ((torch, "_grouped_mm"), (F, "grouped_mm"))} - {None}
TAKE_LOW = {F.embedding, F.linear, *GROUPED}
"""Functions that take a weight in its own dtype here: what they make is float64 all the same."""


FLOAT32_ALONE = "reorder_and_upcast_attn"
"""Of attention modules of transformers' GPT-2: scores and softmax in float32 whatever the dtype of the model. That code refuses
scores of any other dtype; without it the same function is computed."""


class _Promote(TorchFunctionMode):
    """Every cast to a lower float, and every low float `dtype=`, becomes float64."""

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
    """`F.linear`, with a low weight `[out, in]` promoted a block of outputs at a time."""
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
    """`[row, in]` times `[group, in, out]`, rows up to `offs[g]` with group g's weight: the kernel has no float64."""
    out = rows.new_zeros(len(rows), weights.shape[-1], dtype=torch.float64)
    start = 0
    for group, stop in enumerate(offs.tolist()):
        out[start:stop] = rows[start:stop].double() @ weights[group].double()
        start = stop
    return out if bias is None else out + bias.double()


def _whole(value: Any) -> Any:
    """A float64 copy of a weight that stays in its dtype while its module runs, for functions that want all of it."""
    return value.double() if isinstance(value, nn.Parameter) and value.dtype in LOW else value


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


@contextmanager
def promoted(root: nn.Module) -> Iterator[None]:
    """Run `root` in true float64 inside this context; its weights are untouched afterwards."""
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
    """The tensors of a module that stay in their dtype while it runs: the table of a subclass of `Embedding` is read as that of
    an embedding, and a copy of all of it would be the largest tensor of a model."""
    if type(module) in PLAIN:
        return tuple(module._parameters)
    return ("weight",) if isinstance(module, nn.Embedding) else ()


@contextmanager
def _promoted_while_running(module: nn.Module, left: Collection[str] = ()) -> Iterator[None]:
    """Swap the module's own floating tensors, but those that are `left` as they are, for float64 copies between its first and
    last line."""
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
