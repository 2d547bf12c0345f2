"""The matrix products and the softmax of attention, as a model's own code calls them, each at other sizes.

Decoding asks for one query at a time, chunked prefill for some, a batch for several sequences, and kernels that split the
keys reduce them in parts. Followed is the last query, which sees every key, in the first sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parity_audit.backends.attention import SDPA
from parity_audit.backends.operation_case import Case
from parity_audit.backends.row_blocks import MATMUL, SOFTMAX
from parity_audit.core.operations import BATCH, KEYS, QUERIES, OperationsRequest
from parity_audit.core.types import NotTested

SCORES, PATTERN, VALUES, FUSED = (
    "attention scores (q @ k)", "attention pattern (softmax)", "attention values (pattern @ v)", "attention (sdpa)",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A function of torch and the 4-D tensors `[1 head query ...]` that it was given."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class AttentionCalls(TorchFunctionMode):
    """Keeps the first call of each kind that has 4-D tensors; attention comes with them, and nothing else of a decoder."""

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
        """Said when the model's attention goes through none of these functions."""
        if not self.calls:
            why = "its kernel takes the engine's own cache and cannot be called alone; the sites show its result"
            yield NotTested(what="attention as an operation of its own", why=why)


def attention_cases(calls: dict[str, Call], request: OperationsRequest) -> Iterator[Case]:
    """Each call by number of queries and of sequences; the product with the values also by parts of the keys."""
    for name, call in calls.items():
        first: Tensor = call.args[0]
        shape = "x".join(map(str, first.shape[1:]))
        queries = tuple(size for size in request.sizes if size <= first.shape[2])
        yield Case(name, "torch", shape, QUERIES, queries, _by_queries(call))
        yield Case(name, "torch", shape, BATCH, request.sizes, _by_batch(call))
        if name == VALUES:
            yield Case(name, "torch", shape, KEYS, request.splits, _by_parts(call))


def _last(value: Tensor) -> Tensor:
    """The followed query: the last one of the first sequence, `[head ...]`."""
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
    """The mask of the last `size` queries; a causal flag would count them from the first key."""
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
