"""Attention from rotated queries and keys to the weighted sum of values.

    s_ij = cap tanh(q_i . k_j / (scale cap)) + alibi_h j + b(i - j)          (without a cap: q_i . k_j / scale)
    p_ij = e^{s_ij} / (sum_j e^{s_ij} + e^{sink_h})                          over the keys that query i may see
    z_i  = sum_j p_ij v_j

Query head h reads key-value head h // (n_heads / n_kv_heads), unless a map gives another head. ALiBi is written with the position
of the key, as most programs compute it: the paper's distance i - j differs from it by a constant per query, which cancels in the
softmax. In latent attention, keys and values are projected from a latent that is narrower than they are, and all heads share the
last components of the key, the only rotated ones. Sources: grouped queries (arXiv 2305.13245), soft-cap (Gemma 2, arXiv
2408.00118), ALiBi (arXiv 2108.12409), sinks (gpt-oss, after arXiv 2309.17453), latents (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.caps import capped
from parity_audit.formulas.choices import (
    AS_MINUS,
    BELOW_TOP,
    FULL,
    LEFT_OUT,
    LESS,
    OVER_HEADS,
    OVER_QUERIES,
    SOFTMAX,
    SOFTMAX_TWICE,
    WITH_MORE,
    WITH_MORE_BELOW_TOP,
    number_in,
)
from parity_audit.formulas.rounding import steps_of

UNDIVIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid of the scores": torch.sigmoid, "relu of the scores": torch.relu,
    "squared relu of the scores": lambda s: torch.relu(s).square(), "the scores themselves": torch.clone,
    "exp of the scores": torch.exp,
}  # fmt: skip
"""Functions that some programs use in place of the softmax; with them the weights of one query need not sum to 1."""
AXES = {OVER_QUERIES: -2, OVER_HEADS: -3}
"""The axis of `[... head query key]` over which a softmax sums if, by mistake, it does not sum over keys."""


def scores(
    q: Tensor,
    k: Tensor,
    seen: Tensor,
    *,
    scale: float | Sequence[float],
    softcap: float | str | None = None,
    penalties: Tensor | None = None,
    heads: Sequence[int] | None = None,
    masked: str = LEFT_OUT,
    arithmetic: str = FULL,
) -> Tensor:
    """Return the scores that enter the softmax, `[batch head query key]`; a hidden key has -inf, or what `masked` says.

    Args:
        q: `[batch query head d_head]`.
        k: `[batch key kv_head d_head]`.
        seen: which keys a query may attend to, `[batch 1 query key]`.
        scale: divisor of q.k, one number for all heads or one per head.
        softcap: bound of the scores, see `caps.capped`.
        penalties: ALiBi's, `[batch head query key]`, or with an axis of length 1 for the queries (see `alibi.penalties`).
        heads: the key-value head that each query head reads, see `shared_evenly`.
        masked: how the scores of hidden keys are masked: `choices.LEFT_OUT`, `LESS` or `AS_MINUS`.
        arithmetic: rounding of the products: `full`, or a dtype followed by one of `choices.PLACES_IN_SCORES`.
    """
    step = steps_of(arithmetic)
    q, k = step("inputs", q), step("inputs", k)
    keys = shared_evenly(k, q.shape[2], heads)
    # One matrix product for all queries that read a key's head; einsum would copy both sides into this layout.
    grouped = rearrange(q, "batch query (kv_head group) d -> batch kv_head (group query) d", kv_head=keys.shape[2])
    products = grouped @ rearrange(keys, "batch key kv_head d -> batch kv_head d key")
    products = rearrange(
        products, "batch kv_head (group query) key -> batch (kv_head group) query key", query=q.shape[1]
    )
    products = step("products", products) / (scale if isinstance(scale, float) else of_heads(scale, q)[..., None])
    products = capped(products, softcap)
    if penalties is not None:
        products = products + penalties.to(products)
    less, size = number_in(masked, LESS), number_in(masked, AS_MINUS)
    if less is not None:
        return torch.where(seen, products, products - less)
    return products.masked_fill(~seen, -torch.inf if size is None else -size)


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax over keys of scores `[... head query key]`, of the same shape; a query that sees no key gets zeros.

    Args:
        sinks: a logit per head, `[head]`, that is added to the sum in the denominator and has no value of its own.
    """
    if sinks is None:
        return torch.softmax(scores, -1).nan_to_num(0.0)
    total = torch.logsumexp(scores, -1, keepdim=True)
    total = torch.logaddexp(total, sinks[:, None, None].expand_as(total))
    return torch.exp(scores - total).nan_to_num(0.0)


def narrow_softmax(scores: Tensor, sinks: Tensor | None, arithmetic: str) -> Tensor:
    """Return the same as `softmax`, with rounding to a narrow dtype.

    `arithmetic` is a dtype followed by one of `choices.PLACES_IN_A_SOFTMAX`.
    """
    step = steps_of(arithmetic.removesuffix(BELOW_TOP))
    whole = scores
    if sinks is not None:
        whole = torch.cat([scores, sinks[:, None, None].to(scores).expand(*scores.shape[:-1], 1)], -1)
    if arithmetic.endswith(BELOW_TOP):
        whole = whole - whole.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    made = step("scores", whole).softmax(-1).nan_to_num(0.0)
    return step("pattern", made[..., : scores.shape[-1]])


def weights(scores: Tensor, law: str, sinks: Tensor | None = None, arithmetic: str = FULL) -> Tensor:
    """Return the weights of the values, `[... head query key]`, from scores of that shape; a hidden key has the weight 0.

    Softmaxes over queries or over heads are the exception: if every term of a sum is hidden, all its terms get equal weights.

    Args:
        law: one of `choices.LAWS`, or `choices.WITH_MORE` or `WITH_MORE_BELOW_TOP` with a number. Adding 1 to the sum in the
            denominator (`add_zero_attn` in torch, which lets a query attend to nothing) equals a sink of 0 in every head. If the 1
            is added after the largest score was subtracted to avoid overflow, it equals a sink as large as the largest score.
        sinks: as in `softmax`; only `softmax` and `softmax twice` use them.
        arithmetic: rounding inside the softmax, see `narrow_softmax`.
    """
    added = number_in(law, WITH_MORE)
    if added is not None:
        return softmax(scores, scores.new_full((scores.shape[-3],), added).log())
    added = number_in(law, WITH_MORE_BELOW_TOP)
    if added is not None:
        from_zero = scores - scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        return softmax(from_zero, scores.new_full((scores.shape[-3],), added).log())
    if arithmetic != FULL and law == SOFTMAX:
        return narrow_softmax(scores, sinks, arithmetic)
    if law in (SOFTMAX, SOFTMAX_TWICE):
        made = softmax(scores, sinks)
        return made if law == SOFTMAX else softmax(made.masked_fill(scores.isneginf(), -torch.inf))
    if law in AXES:  # Programs mask with a finite number, so a sum of hidden keys alone gives equal weights, not NaN.
        made = torch.softmax(scores, AXES[law])
        return made.nan_to_num(1.0 / scores.shape[AXES[law]])
    return UNDIVIDED[law](scores).masked_fill(scores.isneginf(), 0.0)


def weighted_values(pattern: Tensor, v: Tensor, heads: Sequence[int] | None = None) -> Tensor:
    """Return z, the sum of the values weighted by the pattern, `[batch query head d_head]`.

    Args:
        pattern: `[batch head query key]`.
        v: `[batch key kv_head d_head]`.
        heads: the key-value head that each query head reads, see `shared_evenly`.
    """
    values = shared_evenly(v, pattern.shape[1], heads)
    grouped = rearrange(
        pattern, "batch (kv_head group) query key -> batch kv_head (group query) key", kv_head=values.shape[2]
    )
    z = grouped @ rearrange(values, "batch key kv_head d -> batch kv_head key d")
    return rearrange(z, "batch kv_head (group query) d -> batch query (kv_head group) d", query=pattern.shape[2])


def of_heads(value: float | Sequence[float], like: Tensor) -> Tensor:
    """Return one number for all heads or one per head as `[head 1]`, in the dtype of `like`, to multiply `[... head d_head]` by."""
    return rearrange(torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1), "head -> head 1")


def consecutive(n_heads: int, n_kv_heads: int) -> list[int]:
    """Return the key-value head that each query head reads if consecutive query heads share one."""
    return [head * n_kv_heads // n_heads for head in range(n_heads)]


def shared_evenly(x: Tensor, n_heads: int, heads: Sequence[int] | None = None) -> Tensor:
    """Return keys or values `[batch key kv_head d_head]` in which each head is read by equally many consecutive query heads.

    The input is returned without a copy if it already has this layout. Otherwise the result has one head per query head, taken by
    the map `heads` or, without a map, by `consecutive`.
    """
    if heads is None and n_heads % x.shape[2] == 0:
        return x
    return x[:, :, list(consecutive(n_heads, x.shape[2]) if heads is None else heads)]
