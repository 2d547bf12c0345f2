"""Attention on CUDA: keys in splits of one size, each split summed alone, the splits one after the other.

The number of splits grows with the keys and their boundaries stay, so a query has the same bits in a prompt, in a chunk and
decoded from the cache. Every call has a mask, so that one compiled kernel serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity_audit.batch_invariant.cuda import kernels
from parity_audit.batch_invariant.cuda.launch import ELEMENTS, aligned, launch, widen

QUERIES, KEYS = 16, 32
"""Queries of a program, and keys of a step of it."""
SPLIT = 256
"""Keys of a program."""

Composed = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, composed: Composed) -> Tensor:
    """`softmax(query @ key.T * scale + mask) @ value`, differentiable; `mask` is float32 and broadcasts over the heads.

    `[batch, head, query_pos or key_pos, d_head]`; `composed` computes the same from products, for the gradients.
    """
    found: Tensor = _Attention.apply(query, key, value, mask, scale, composed)  # type: ignore[no-untyped-call]
    return found


class _Attention(torch.autograd.Function):
    """The kernel forwards; backwards the gradients of the composition."""

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
    """All splits of all queries, then their combination."""
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
    """Contiguous, with heads of a width whose strides are of one kind."""
    return aligned(torch.constant_pad_nd(values, (0, -values.shape[3] % ELEMENTS)))


def _power(width: int) -> int:
    """The least power of two that holds a head, and that products of tiles take."""
    return max(16, 1 << (width - 1).bit_length())
