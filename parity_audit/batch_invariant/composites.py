"""`matmul` and `scaled_dot_product_attention` as compositions of fewer products, on every device and differentiable.

torch's own `matmul` decides by memory layout whether rows are multiplied by a weight or batches by copies of it, and
its attention chooses a kernel by shape and mask. Here a weight is always a weight, and attention is always the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity_audit.batch_invariant import batched, products
from parity_audit.batch_invariant.batched import widened

QUERIES = 256
"""Queries whose scores are held at once: bounds memory, and does not change bits."""


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """`torch.matmul`: rows times a weight where the second factor is a matrix, else a batch of products."""
    if left.dim() == 1:
        return matmul(left[None], right).squeeze(-2 if right.dim() > 1 else 0)
    if right.dim() == 1:
        return matmul(left, right[:, None]).squeeze(-1)
    plain = _needs_no_dispatch(left, right)
    if right.dim() == 2:
        rows = left if left.dim() == 2 else left.reshape(-1, left.shape[-1])
        return (products.mm if plain else torch.mm)(rows, right).view(*left.shape[:-1], right.shape[-1])
    batch = left.shape[:-2]
    if batch != right.shape[:-2]:
        batch = torch.broadcast_shapes(batch, right.shape[:-2])  # type: ignore[no-untyped-call]
    count = math.prod(batch)
    found = (batched.bmm if plain else torch.bmm)(_merged(left, batch, count), _merged(right, batch, count))
    return found.view(*batch, left.shape[-2], right.shape[-1])


def _needs_no_dispatch(left: Tensor, right: Tensor) -> bool:
    """Whether the kernels of the CPU can be called at once: no gradients, no subclass that a mode of torch made."""
    return not torch.is_grad_enabled() and all(
        tensor.is_cpu and type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (left, right)
    )


def _merged(factor: Tensor, batch: torch.Size, count: int) -> Tensor:
    """One batch dimension; a transposed matrix (keys) stays transposed where merging copies it."""
    if factor.stride(-2) == 1 and factor.stride(-1) != 1:
        return _merged(factor.mT, batch, count).mT
    if factor.shape[:-2] != batch:
        factor = factor.expand(*batch, *factor.shape[-2:])
    return factor.reshape(count, *factor.shape[-2:])


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention`, `[..., query_pos, d_head]`: scores, softmax and sum in float32 or wider."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    wide = widened(query.dtype)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], q.shape[-2], k.shape[-2])
    parts = []
    for start in range(0, q.shape[-2], QUERIES):
        stop = min(start + QUERIES, q.shape[-2])
        scores = torch.matmul(q[..., start:stop, :], k.mT) * scale
        weights = _weights(scores, None if attn_mask is None else attn_mask[..., start:stop, :], is_causal, start)
        parts.append(torch.matmul(torch.dropout(weights, dropout_p, dropout_p > 0), v))
    if not parts:
        return query.new_empty(*query.shape[:-1], value.shape[-1])
    return torch.cat(parts, dim=-2).to(query.dtype) if len(parts) > 1 else parts[0].to(query.dtype)


def _weights(scores: Tensor, mask: Tensor | None, is_causal: bool, start: int) -> Tensor:
    """Softmax of masked scores `[..., query_pos, key_pos]`; a query without any key gets zeros, as in torch."""
    if is_causal:
        query = torch.arange(start, start + scores.shape[-2], device=scores.device)
        later = torch.arange(scores.shape[-1], device=scores.device) > query[:, None]
        scores = scores.masked_fill(later, -math.inf)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
