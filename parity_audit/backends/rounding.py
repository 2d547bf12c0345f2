"""A live model with some of its steps rounded to a smaller dtype, and back again afterwards.

Used to ask whether a rounding explains what another program computes: the head as a product in bfloat16, rotary tables
kept in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity_audit.core.rollouts import Variation

ROTARY = "rotary_emb"
"""What transformers calls the module that returns the cosine and sine tables."""


@contextmanager
def rounded(model: Any, variation: Variation) -> Iterator[None]:
    """Impose the roundings of a variation while this is open.

    Raises:
        ValueError: the model has no such step (rotary tables of a model without rotary embedding).
    """
    with ExitStack() as stack:
        if variation.head_dtype:
            head = model.get_output_embeddings()
            stack.enter_context(_replaced(head, _head_in(head, getattr(torch, variation.head_dtype))))
        if variation.rope_dtype:
            tables = [module for name, module in model.named_modules() if name.split(".")[-1] == ROTARY]
            if not tables:
                raise ValueError(f"the model has no module `{ROTARY}` whose tables could be rounded")
            for module in tables:
                stack.enter_context(_replaced(module, _tables_in(module, getattr(torch, variation.rope_dtype))))
        yield


def _head_in(head: Any, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The product of the head with operands and result in `dtype`, accumulated as the backend does for that dtype."""

    def forward(hidden: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # the judge's mode would turn every cast into one to float64
            bias = None if head.bias is None else head.bias.to(dtype)
            return F.linear(hidden.to(dtype), head.weight.to(dtype), bias).to(hidden.dtype)

    return forward


def _tables_in(module: Any, dtype: torch.dtype) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tables = own(*args, **kwargs)
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
