"""The judge's attention in blocks of query rows, so that long probes fit in memory and hidden keys are skipped.

The rows of attention do not depend on each other. While the mode `RowBlocks` is active, a large product `query @ key^T`
is not computed. It becomes a `DeferredScores`, which records the operations that are applied to it (scale, soft-cap, mask,
softmax, casts). The final product `pattern @ value` then evaluates these operations on one block of rows at a time. It
leaves out the keys before the first and after the last key that the mask shows to any row of the block. This computes
the same function whichever release wrote the attention code. Any other operation on a promise first computes the whole
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEFER_ABOVE_BYTES = 1 << 26
"""Size of the scores above which their product is deferred."""
BLOCK_BYTES = 1 << 24
"""Size of the scores of one block of rows."""
HIDDEN_BELOW = -1e30
"""A key whose mask entry is at most this value gets a weight of exactly 0 from the softmax."""


def _methods(*names: str) -> set[Any]:
    return {getattr(holder, name) for name in names for holder in (Tensor, torch) if hasattr(holder, name)}


MATMUL = _methods("matmul", "__matmul__")
SOFTMAX = {F.softmax, *_methods("softmax")}
ADD = _methods("add", "__add__", "__radd__")
CASTS = _methods("to", "float", "double", "half", "bfloat16", "type", "type_as")
FACTORS = _methods("mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__")
ROWWISE = ADD | CASTS | FACTORS | _methods("sub", "__sub__", "tanh", "masked_fill")
LOOKS = {Tensor.shape.__get__, Tensor.ndim.__get__, *_methods("size", "dim")}  # type: ignore[attr-defined]


class DeferredScores(Tensor):
    """Attention scores `[batch, head, query_pos, key_pos]` that are not computed yet: a tensor without memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    state: _State


@dataclass
class _State:
    """The factors of a promise and the operations that were applied to it.

    `mask` decides which keys count, if that is known. `softmax` says whether a softmax was applied. `whole` is the
    complete tensor, once something needed it.
    """

    query: Tensor
    key: Tensor
    steps: tuple[Callable[[Tensor, slice, slice], Tensor], ...] = ()
    mask: Tensor | None = None
    softmax: bool = False
    whole: Tensor | None = None

    def block(self, rows: slice, keys: slice) -> Tensor:
        """Compute the given query rows and keys, with all recorded operations applied."""
        value = torch.matmul(self.query[..., rows, :], self.key[..., keys])
        for step in self.steps:
            value = step(value, rows, keys)
        return value

    def row_blocks(self) -> Iterator[slice]:
        """Yield consecutive slices of rows that cover all rows, each with scores of about `BLOCK_BYTES`."""
        length = self.query.shape[-2]
        per_row = self.query.shape[0] * self.query.shape[1] * self.key.shape[-1] * self.query.element_size()
        height = max(1, BLOCK_BYTES // per_row)
        yield from (slice(start, min(start + height, length)) for start in range(0, length, height))

    def keys_of(self, rows: slice) -> slice:
        """Return the range from the first to the last key that the mask shows to any of these rows.

        Returns all keys if no softmax was applied yet, if the mask is not known, or if it hides every key.
        """
        if self.mask is None or not self.softmax or self.mask.ndim < 2 or self.mask.shape[-1] == 1:
            return slice(0, self.key.shape[-1])
        shown = (_cut(self.mask, rows, slice(None), self) > HIDDEN_BELOW).flatten(0, -2).any(0).nonzero()
        return slice(int(shown[0]), int(shown[-1]) + 1) if len(shown) else slice(0, self.key.shape[-1])


def deferred_product(query: Tensor, key: Tensor, **more: Any) -> DeferredScores:
    """Return the product of `query [b h q d]` and `key [b h d k]` as a promise that is not computed yet."""
    empty = torch.empty((*query.shape[:-1], key.shape[-1]), dtype=query.dtype, device="meta")
    made = empty.as_subclass(DeferredScores)
    made.state = _State(query, key, **more)
    return made


def whole(value: Any) -> Any:
    """Return the computed tensor of a promise, also inside a list or tuple, and any other value unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(whole, value)) if _promised(value) else value
    if not isinstance(value, DeferredScores):
        return value
    state = value.state
    if state.whole is None:
        state.whole = state.query.new_empty(value.shape)
        for rows in state.row_blocks():
            state.whole[..., rows, :] = state.block(rows, slice(None))
    return state.whole


class RowBlocks(TorchFunctionMode):
    """While active, turns large products of queries and keys into promises and evaluates them when they are needed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _promised((*args, *kwargs.values())):
            return deferred_product(*args[:2]) if func in MATMUL and _large(*args[:2]) else func(*args, **kwargs)
        if func in LOOKS:
            return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DeferredScores) and first.state.whole is None:
            if func in MATMUL and not isinstance(args[1], DeferredScores):
                return _product(first.state, args[1])
            if _rowwise(func, first, args[1:], kwargs):
                return _then(first.state, func, args[1:], kwargs)
        return func(*map(whole, args), **{key: whole(value) for key, value in kwargs.items()})


def _promised(values: Any) -> bool:
    """Whether one of the values, or an element of a list or tuple among them, is a promise."""
    return any(
        isinstance(value, DeferredScores) or (isinstance(value, (list, tuple)) and _promised(value)) for value in values
    )


def _large(query: Any, key: Any) -> bool:
    """Whether this is a product of queries and keys whose scores need more than `DEFER_ABOVE_BYTES`.

    `key [b h d k]` must have more keys than `d_head`. The product of a pattern and values `[b h k d]` is thus excluded.
    """
    if not all(isinstance(value, Tensor) and value.ndim == 4 for value in (query, key)):
        return False
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[3] * query.element_size()
    return bool(query.shape[:2] == key.shape[:2] and key.shape[3] > key.shape[2] and scores > DEFER_ABOVE_BYTES)


def _rowwise(func: Any, scores: DeferredScores, rest: Any, kwargs: dict[str, Any]) -> bool:
    """Whether each row of the result depends only on the same row of `scores`, so that the operation can be recorded."""
    if func in SOFTMAX:
        return (rest[0] if rest else kwargs.get("dim")) in (-1, 3)
    if func is F.dropout:
        return not kwargs.get("training", True)
    others = [value for value in (*rest, *kwargs.values()) if isinstance(value, Tensor)]
    fits = all(torch.broadcast_shapes(other.shape, scores.shape) == scores.shape for other in others)
    return func in ROWWISE and fits and not any(isinstance(other, DeferredScores) for other in others)


def _then(state: _State, func: Any, rest: Any, kwargs: dict[str, Any]) -> DeferredScores:
    """Return the promise with one more operation recorded."""

    def step(value: Tensor, rows: slice, keys: slice) -> Tensor:
        given = (_cut(other, rows, keys, state) for other in rest)
        named = {key: _cut(other, rows, keys, state) for key, other in kwargs.items()}
        result: Tensor = func(value, *given, **named)
        return result

    softmax = state.softmax or func in SOFTMAX
    mask = _mask_after(state, func, rest)
    return deferred_product(state.query, state.key, steps=(*state.steps, step), mask=mask, softmax=softmax)


def _mask_after(state: _State, func: Any, rest: Any) -> Tensor | None:
    """Return the mask that decides which keys count after this operation, None if that is not known.

    It is the tensor that was added last before the softmax, unless a later operation may change what it hides.
    """
    if state.softmax:
        return state.mask if func in CASTS | FACTORS or func is F.dropout else None
    if func in ADD:
        return rest[0] if rest and isinstance(rest[0], Tensor) else None
    return state.mask if func in CASTS | SOFTMAX else None


def _cut(value: Any, rows: slice, keys: slice, state: _State) -> Any:
    """Return the part of an operand that belongs to these rows and keys; a broadcast axis of size 1 is kept."""
    if not isinstance(value, Tensor):
        return value
    if value.ndim >= 2 and value.shape[-2] == state.query.shape[-2] != 1:
        value = value[..., rows, :]
    return value[..., keys] if value.ndim >= 1 and value.shape[-1] == state.key.shape[-1] != 1 else value


def _product(state: _State, value: Tensor) -> Tensor:
    """Return the pattern `[b h q k]` times `value [b h k d]`, computed one block of rows at a time."""
    parts = []
    for rows in state.row_blocks():
        keys = state.keys_of(rows)
        parts.append(torch.matmul(state.block(rows, keys), value[..., keys, :]))
    return torch.cat(parts, dim=-2)
