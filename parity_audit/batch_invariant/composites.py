"""`matmul` and `scaled_dot_product_attention` composed of a few basic products, on every device and differentiable.

torch's own `matmul` decides by memory layout whether to multiply rows by a weight or batches by copies of the weight,
and its attention chooses a kernel by shape and mask. Here a matrix as second factor is always treated as a weight, and
attention is always computed in the same way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity_audit.batch_invariant import batched, products
from parity_audit.batch_invariant.batched import widened

QUERIES = 256
"""Queries whose scores are in memory at a time; the number limits memory and does not change bits."""
PLAIN = (Tensor, torch.nn.Parameter)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Compute `torch.matmul`: rows times a weight if the second factor is a matrix, else a batch of products."""
    if left.dim() == 1:
        return matmul(left[None], right).squeeze(-2 if right.dim() > 1 else 0)
    if right.dim() == 1:
        return matmul(left, right[:, None]).squeeze(-1)
    plain = _needs_no_dispatch(left, right)
    if right.dim() == 2:
        if plain:
            return products.times(left, right)
        rows = left if left.dim() == 2 else left.reshape(-1, left.shape[-1])
        return torch.mm(rows, right).view(*left.shape[:-1], right.shape[-1])
    batch = left.shape[:-2]
    if batch != right.shape[:-2]:
        batch = torch.broadcast_shapes(batch, right.shape[:-2])
    count = math.prod(batch)
    found = (batched.times if plain else torch.bmm)(_merged(left, batch, count), _merged(right, batch, count))
    return found.reshape(*batch, left.shape[-2], right.shape[-1])


def _needs_no_dispatch(left: Tensor, right: Tensor) -> bool:
    """Whether the CPU kernels of this package can be called without torch's dispatcher.

    This needs CPU tensors that are no subclasses (torch's modes may make such subclasses), and gradients switched off.
    """
    plain = type(left) in PLAIN and type(right) in PLAIN
    return plain and not torch.is_grad_enabled() and left.is_cpu and right.is_cpu


def _merged(factor: Tensor, batch: torch.Size, count: int) -> Tensor:
    """Return a factor with its batch dimensions merged into one of size `count`.

    If merging has to copy a matrix that is transposed in memory (keys), the copy is transposed as well.
    """
    if factor.shape[:-2] != batch:
        factor = factor.expand(*batch, *factor.shape[-2:])
    if factor.stride(-2) == 1 and factor.stride(-1) != 1:
        return factor.mT.reshape(count, factor.shape[-1], factor.shape[-2]).mT
    return factor.reshape(count, *factor.shape[-2:])


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` `[..., query_pos, d_head]`, its inner steps in float32 or wider."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
    fused = has_split_kernel(query) and not dropout_p
    parts = []
    for start in range(0, query.shape[-2], QUERIES):
        rows = slice(start, start + QUERIES)
        q, mask = query[..., rows, :], None if attn_mask is None else attn_mask[..., rows, :]
        if fused:
            parts.append(_in_splits(q, key, value, _additive(mask, is_causal, start, q, key), scale))
        else:
            parts.append(_composed(q, key, value, mask, scale, dropout_p, is_causal, start))
    if not parts:
        return query.new_empty(*query.shape[:-1], value.shape[-1])
    return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]


def has_split_kernel(query: Tensor) -> bool:
    """Whether a single kernel computes attention on this device and in this dtype.

    There is none for float64, for which attention is composed of products.
    """
    return query.is_cuda and query.dtype != torch.float64


def _composed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout_p: float = 0.0,
    is_causal: bool = False, start: int = 0,
) -> Tensor:  # fmt: skip
    """Compute attention with one kernel each for scores, softmax and sum, in float32 or wider."""
    wide = widened(query.dtype)
    scores = torch.matmul(query.to(wide), key.to(wide).mT) * scale
    weights = torch.dropout(_weights(scores, mask, is_causal, start), dropout_p, dropout_p > 0)
    return torch.matmul(weights, value.to(wide)).to(query.dtype)


def _in_splits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute attention with the CUDA kernel, which takes `[batch, head, pos, d_head]`."""
    from parity_audit.batch_invariant.cuda import split_attention  # imports Triton

    batch = query.shape[:-3]

    def four(values: Tensor) -> Tensor:
        return values.expand(*batch, *values.shape[-3:]).reshape(-1, *values.shape[-3:])

    q, k, v = (four(one if one.dim() > 2 else one[None]) for one in (query, key, value))
    found = split_attention.attention(q, k, v, four(mask) if mask.dim() > 4 else mask, scale, _composed)
    return found.reshape(*query.shape[:-1], value.shape[-1])


def _additive(mask: Tensor | None, is_causal: bool, start: int, query: Tensor, key: Tensor) -> Tensor:
    """Return the float32 mask that is added to scores `[..., query_pos, key_pos]`, with at least four dimensions.

    Hidden keys have minus infinity. Visible keys have 0, or the number in an additive `mask`.
    """
    shape = (1, 1, query.shape[-2], key.shape[-2])
    if mask is None:
        added = torch.zeros(shape, device=query.device)
    elif mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, device=query.device).masked_fill(~mask, -math.inf)
    else:
        added = mask.float()
    if is_causal:
        place = torch.arange(start, start + query.shape[-2], device=query.device)
        added = added.masked_fill(torch.arange(key.shape[-2], device=query.device) > place[:, None], -math.inf)
    return added.view(*(1,) * (4 - added.dim()), *added.shape)


def _weights(scores: Tensor, mask: Tensor | None, is_causal: bool, start: int) -> Tensor:
    """Return the softmax of masked scores `[..., query_pos, key_pos]`.

    With a `mask`, a query whose keys are all hidden gets zeros, as in torch.
    """
    if is_causal:
        query = torch.arange(start, start + scores.shape[-2], device=scores.device)
        later = torch.arange(scores.shape[-1], device=scores.device) > query[:, None]
        scores = scores.masked_fill(later, -math.inf)
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
