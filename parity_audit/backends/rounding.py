"""Run single steps of a live model in another dtype, or with another attention implementation, for a limited time.

This measures how much of a difference the rounding of one step explains: the head's product or the rotary tables in
bfloat16 or float32, the routers' products, or keys and values rounded as a narrow cache stores them. All public
functions but `narrow_cache` are context managers that restore the model afterwards. An empty argument changes nothing.
`routers_in` and `tables_in` raise ValueError if the model has no such step.
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
"""Name that transformers gives to the module that returns the cosine and sine tables."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config attributes that hold the number of experts, which is the number of rows of a router's weight."""


class _LinearIn(TorchFunctionMode):
    """While active, computes every `F.linear` with its operands cast to `dtype`.

    A result that is wider than the input keeps its dtype; a narrower one is cast back to the dtype of the input.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        with torch._C.DisableTorchFunction():  # else the judge's mode turns every cast into one to float64
            operands = {name: None if value is None else value.to(self.dtype) for name, value in given.items()}
            return F.linear(**operands).to(torch.promote_types(given["input"].dtype, self.dtype))


@contextmanager
def head_in(model: Any, dtype: str) -> Iterator[None]:
    """Compute the head's product with operands in `dtype`; torch accumulates as it does for that dtype.

    Logits in a wider dtype than the hidden states stay in it; logits in a narrower one are cast back.
    """
    with _linear_in([model.get_output_embeddings()] if dtype else [], dtype):
        yield


@contextmanager
def routers_in(model: Any, dtype: str) -> Iterator[None]:
    """Compute the products of the routers, the modules whose weight has one row per expert, in `dtype`.

    Raises:
        ValueError: the model has no router.
    """
    routers = list(_routers(model)) if dtype else []
    if dtype and not routers:
        raise ValueError("the model has no router: no module has one row of weight per expert")
    with _linear_in(routers, dtype):
        yield


@contextmanager
def tables_in(model: Any, dtype: str) -> Iterator[None]:
    """Use rotary tables in `dtype`.

    If `dtype` is wider than the activations, the rotation is computed in it and its result cast back. If it is not, the
    tables are rounded to `dtype` and cast back, and the rotation runs in the dtype it had before.

    Raises:
        ValueError: the model has no module `ROTARY`.
    """
    modules = [module for name, module in model.named_modules() if name.split(".")[-1] == ROTARY] if dtype else []
    if dtype and not modules:
        raise ValueError(f"the model has no module `{ROTARY}` whose tables could be rounded")
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_replaced(module, _tables(module, getattr(torch, dtype))))
        yield


@contextmanager
def attention_by(model: Any, implementation: str) -> Iterator[None]:
    """Run with another attention implementation of transformers, such as `eager`."""
    before = model.config._attn_implementation
    if implementation:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if implementation:
            model.set_attn_implementation(before)


def narrow_cache(dtype: str) -> Any:
    """Return a key-value cache that rounds keys and values to `dtype` when it stores them; None if `dtype` is empty."""
    if not dtype:
        return None
    from transformers.cache_utils import DynamicCache

    class Narrow(DynamicCache):
        """Keys and values `[batch head pos d_head]`, rounded once when they are stored; their dtype stays the same."""

        updates = 0

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.updates += 1
            keys, values = (state.to(getattr(torch, dtype)).to(state.dtype) for state in (key_states, value_states))
            return super().update(keys, values, *args, **kwargs)

    return Narrow()


def _routers(model: Any) -> Iterator[nn.Module]:
    """Yield the routers of a mixture of experts: the modules whose weight is a matrix with one row per expert."""
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
    """Return a forward of `module` that computes each `F.linear` in `dtype`."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _LinearIn(dtype):
            return own(*args, **kwargs)

    return forward


def _tables(module: Any, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a forward of the rotary `module` that returns its tables in `dtype`, or rounded to it (see `tables_in`)."""
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
    """Replace the forward of a module while the context is open; its hooks still run."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
