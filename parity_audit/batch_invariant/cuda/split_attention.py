"""Attention on CUDA: the keys are divided into splits of a fixed size, which are summed separately and then combined in order.

More keys mean more splits, but the boundaries of the earlier splits stay the same. So the output for a query has the same bits
in a prefill, in a chunk of a prefill and in a decode step with the KV cache. Every call has a mask, so that one compiled kernel
serves all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity_audit.batch_invariant.cuda import kernels
from parity_audit.batch_invariant.cuda.launch import ELEMENTS, aligned, launch, widen

QUERIES, KEYS = 16, 32
"""Queries that a program processes, and keys that it processes per step."""
SPLIT = 256
"""Keys that a program processes in all: the size of a split."""

Composed = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, composed: Composed) -> Tensor:
    """Return `softmax(query @ key.T * scale + mask) @ value`, differentiable.

    Args:
        query, key, value: `[batch, head, query_pos or key_pos, d_head]`.
        mask: float32 `[batch, head, query_pos, key_pos]`, added to the scores; all dimensions but the last may be 1.
        composed: computes the same formula from separate products and a softmax; the gradients are those of this function.
    """
    found: Tensor = _Attention.apply(query, key, value, mask, scale, composed)  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    """Runs the kernel in the forward pass and differentiates `composed` in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, composed: Composed
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.composed = scale, composed
        return _splits(query, key, value, mask, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [one.detach().requires_grad_(one.is_floating_point()) for one in ctx.saved_tensors]
            out = ctx.composed(*inputs, ctx.scale)
            found = torch.autograd.grad(out, inputs, gradients[0], allow_unused=True)
        return (*found, None, None)


def _splits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention output: one launch computes all splits, and a second combines those of each query."""
    batch, own, queries, width = query.shape
    keys, value_width, heads = key.shape[2], value.shape[3], batch * own
    out = query.new_zeros(batch, own, queries, value_width)
    if not out.numel() or not keys:
        return out
    q, k, v = (_even(one) for one in (query, key, value))
    mask = mask.contiguous().expand(batch, own, queries, keys)
    count = -(-keys // SPLIT)
    sums = q.new_empty(count, heads, queries, value_width, dtype=torch.float32)
    peaks, totals = (sums.new_empty(count, heads, queries) for _ in range(2))
    launch(
        kernels.attention_split, (heads * -(-queries // QUERIES), count), q, k, v, mask, sums, peaks, totals, heads, own, queries,
        keys, float(scale), q.shape[3], k.shape[3], v.shape[3], *mask.stride()[:3], width, value_width,
        QUERIES=QUERIES, KEYS=KEYS, SPLIT=SPLIT, WIDTH=_power(width), VALUE_WIDTH=_power(value_width), WIDEN=widen(q.dtype),
    )  # fmt: skip
    launch(
        kernels.attention_combined, (heads * queries,), sums, peaks, totals, out, heads * queries, count, value_width,
        VALUE_WIDTH=_power(value_width),
    )  # fmt: skip
    return out


def _even(values: Tensor) -> Tensor:
    """Return the tensor contiguous, with the head width padded with zeros to a multiple of `ELEMENTS`."""
    return aligned(torch.constant_pad_nd(values, (0, -values.shape[3] % ELEMENTS)))


def _power(width: int) -> int:
    """Return the smallest power of two that is at least the head width and at least 16, the least size that `tl.dot` accepts."""
    return max(16, 1 << (width - 1).bit_length())
