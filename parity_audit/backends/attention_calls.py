"""Run the matrix products and the softmax of attention, as the model's own code calls them, again at other sizes.

The sizes are those that inference produces: a decode step computes one query at a time, chunked prefill computes some
queries, a batch computes several sequences, and kernels that split the keys add up partial results. At each size the same row
of the result is returned: the last query, which sees every key, of the first sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity_audit.backends.attention import SDPA
from parity_audit.backends.operation_case import OperationCase
from parity_audit.backends.row_blocks import MATMUL, SOFTMAX
from parity_audit.core.operations import BATCH, KEYS, QUERIES, OperationsRequest
from parity_audit.core.types import NotTested

SCORES, PATTERN, VALUES, FUSED = (
    "attention scores (q @ k)", "attention pattern (softmax)", "attention values (pattern @ v)", "attention (sdpa)",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A torch function and the arguments of one call of it; the first is a 4-D tensor `[1 head query ...]`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class AttentionCalls(TorchFunctionMode):
    """Keeps the first call of each kind that takes 4-D tensors; in a decoder only attention calls do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self._kind(func, args)
        if name and name not in self.calls:
            copied = tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in args)
            self.calls[name] = Call(func, copied, dict(kwargs))
        return func(*args, **kwargs)

    def _kind(self, func: Any, args: Any) -> str:
        if not args or not isinstance(args[0], Tensor) or args[0].ndim != 4 or len(args[0]) != 1:
            return ""
        if func in SDPA:
            return FUSED
        if func in SOFTMAX:
            return PATTERN
        if func in MATMUL and isinstance(args[1], Tensor) and args[1].ndim == 4:
            return VALUES if SCORES in self.calls and PATTERN in self.calls else SCORES
        return ""

    def not_tested(self) -> Iterator[NotTested]:
        """Yield one entry if the model's attention calls none of these functions, else nothing."""
        if not self.calls:
            why = "its kernel takes the engine's own cache and cannot be called alone; the sites show its result"
            yield NotTested(what="attention as an operation of its own", why=why)


def attention_cases(calls: dict[str, Call], request: OperationsRequest) -> Iterator[OperationCase]:
    """Yield the cases of each recorded call: by number of queries and by number of sequences.

    The product of pattern and values is also run by number of parts of the keys.
    """
    for name, call in calls.items():
        first: Tensor = call.args[0]
        shape = "x".join(map(str, first.shape[1:]))
        queries = tuple(size for size in request.sizes if size <= first.shape[2])
        yield OperationCase(name, "torch", shape, QUERIES, queries, _by_queries(call))
        yield OperationCase(name, "torch", shape, BATCH, request.sizes, _by_batch(call))
        if name == VALUES:
            yield OperationCase(name, "torch", shape, KEYS, request.splits, _by_parts(call))


def _last(value: Tensor) -> Tensor:
    """Return the row that is compared between sizes: the last query of the first sequence, `[head ...]`."""
    return value[0, :, -1]


def _by_queries(call: Call) -> Callable[[int], Tensor]:
    def at(size: int) -> Tensor:
        first, *rest = call.args
        kwargs = dict(call.kwargs)
        total = first.shape[2]
        if call.func in SDPA and size < total:
            kwargs = _masked(kwargs, first, size, total)
        return _last(call.func(first[:, :, total - size :], *rest, **kwargs))

    return at


def _masked(kwargs: dict[str, Any], query: Tensor, size: int, total: int) -> dict[str, Any]:
    """Return the keyword arguments with a mask for the last `size` of `total` queries.

    A causal flag is replaced by an explicit mask, because with fewer queries than keys the flag would align the first query
    with the first key.
    """
    mask = kwargs.get("attn_mask")
    if isinstance(mask, Tensor):
        return {**kwargs, "attn_mask": mask[..., mask.shape[-2] - size :, :]}
    if not kwargs.get("is_causal"):
        return kwargs
    causal = torch.ones(total, total, dtype=torch.bool, device=query.device).tril()
    return {**kwargs, "is_causal": False, "attn_mask": causal[total - size :]}


def _by_batch(call: Call) -> Callable[[int], Tensor]:
    def at(size: int) -> Tensor:
        def repeated(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.ndim == 4 and len(value) == 1
            return value.repeat(size, 1, 1, 1) if whole else value

        args = (repeated(value) for value in call.args)
        return _last(call.func(*args, **{key: repeated(value) for key, value in call.kwargs.items()}))

    return at


def _by_parts(call: Call) -> Callable[[int], Tensor]:
    def at(parts: int) -> Tensor:
        pattern, values = call.args[:2]
        pieces = zip(pattern.chunk(parts, dim=-1), values.chunk(parts, dim=-2), strict=True)
        total = None
        for own, theirs in pieces:
            product = call.func(own, theirs)
            total = product if total is None else total + product
        assert total is not None
        return _last(total)

    return at
