"""Steps of a live model in another dtype, and back again afterwards.

Used to ask what a rounding explains: the head as a product in bfloat16 or in float32, rotary tables in bfloat16 or in
float32, routers, keys and values as a narrow cache keeps them. Each function is a context manager that does nothing for
an empty dtype and raises ValueError where the model has no such step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parity_audit.backends.loading import text_config
from parity_audit.backends.rotary_tables import FineTable

ROTARY = "rotary_emb"
"""What transformers calls the module that returns the cosine and sine tables."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config attributes that hold the number of experts: the rows of a router's weight."""


class _LinearIn(TorchFunctionMode):
    """Every `F.linear` with operands and result in one dtype; a wider dtype is kept, a narrower one is cast back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        with torch._C.DisableTorchFunction():  # the judge's mode would turn every cast into one to float64
            operands = {name: None if value is None else value.to(self.dtype) for name, value in given.items()}
            return F.linear(**operands).to(torch.promote_types(given["input"].dtype, self.dtype))


@contextmanager
def head_in(model: Any, dtype: str) -> Iterator[None]:
    """The head's product with operands and result in a dtype, accumulated as the backend does for that dtype."""
    with _linear_in([model.get_output_embeddings()] if dtype else [], dtype):
        yield


@contextmanager
def routers_in(model: Any, dtype: str) -> Iterator[None]:
    """The routers' products in a dtype: modules with one row of weight per expert."""
    routers = list(_routers(model)) if dtype else []
    if dtype and not routers:
        raise ValueError("the model has no router: no module has one row of weight per expert")
    with _linear_in(routers, dtype):
        yield


@contextmanager
def tables_in(model: Any, dtype: str) -> Iterator[None]:
    """Rotary tables in a dtype. Wider ones than the activations rotate in that dtype, and the result is cast back."""
    modules = [module for name, module in model.named_modules() if name.split(".")[-1] == ROTARY] if dtype else []
    if dtype and not modules:
        raise ValueError(f"the model has no module `{ROTARY}` whose tables could be rounded")
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_replaced(module, _tables(module, getattr(torch, dtype))))
        yield


@contextmanager
def attention_by(model: Any, implementation: str) -> Iterator[None]:
    """Another attention implementation of transformers."""
    before = model.config._attn_implementation
    if implementation:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if implementation:
            model.set_attn_implementation(before)


def narrow_cache(dtype: str) -> Any:
    """A key-value cache that hands out what it was given rounded to a dtype; None for an empty one."""
    if not dtype:
        return None
    from transformers.cache_utils import DynamicCache

    class Narrow(DynamicCache):
        """Keys and values `[batch head pos d_head]`, rounded once when they are stored."""

        updates = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.updates += 1
            keys, values = (state.to(getattr(torch, dtype)).to(state.dtype) for state in (key_states, value_states))
            return super().update(keys, values, *args, **kwargs)

    return Narrow()


def _routers(model: Any) -> Iterator[nn.Module]:
    config = text_config(model.config)
    experts = next((getattr(config, name) for name in EXPERT_COUNTS if getattr(config, name, None)), None)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if experts and isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == experts:
            yield module


@contextmanager
def _linear_in(modules: list[Any], dtype: str) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_replaced(module, _under(module, getattr(torch, dtype))))
        yield


def _under(module: Any, dtype: torch.dtype) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _LinearIn(dtype):
            return own(*args, **kwargs)

    return forward


def _tables(module: Any, dtype: torch.dtype) -> Callable[..., Any]:
    own = module.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.finfo(dtype).eps < torch.finfo(hidden.dtype).eps:
            return tuple(FineTable.of(table) for table in own(hidden.to(dtype), *args, **kwargs))
        tables = own(hidden, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return tuple(table.to(dtype).to(table.dtype) for table in tables)

    return forward


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The module with another forward; hooks on it still run."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
