"""The gated delta rule: linear attention with a state per head that decays and is corrected (Qwen3-Next, Qwen3.5).

    c_t = h(sum_i w_i x_{t-taps+1+i})                     a causal convolution of each channel of queries, keys and values
    q = c_q / |c_q| / scale,  k = c_k / |c_k|             lengths are computed with an eps inside the root
    S_t = g_t S_{t-1} + k_t b_t (v_t - (g_t S_{t-1})^T k_t)^T       the rule; b is the share of the error that is corrected
    S_t = g_t S_{t-1} + k_t b_t v_t^T                     the rule without the correction
    o_t = S_t^T q_t
    g = exp(-exp(A) softplus(a + dt)),  b = sigmoid(...)  A and dt are stored, one number per head
    y = RMS norm(o) h(z)                                  the gate is applied after the norm, or before it

Sources: Gated Delta Networks (arXiv 2412.06464), transformers modeling_qwen3_next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from parity_audit.formulas import norms
from parity_audit.formulas.choices import DECAYED, DELTA, GATE_ORDERS, TAPS, UNDECAYED

Activation = Callable[[Tensor], Tensor]


def convolved(x: Tensor, weight: Tensor, activation: Activation, *, order: str = TAPS[0]) -> Tensor:
    """Return a causal convolution of each channel separately, `[batch pos channel]`, for x of the same shape.

    Args:
        weight: `[channel tap]`.
        activation: applied to the output of the convolution.
        order: one of `choices.TAPS`.
    """
    taps = weight.shape[-1]
    weight = weight.flip(-1) if order == TAPS[1] else weight
    padded = F.pad(x, (0, 0, taps - 1, 0))
    windows = padded.unfold(1, taps, 1)
    return activation(einsum(windows, weight, "batch pos channel tap, channel tap -> batch pos channel"))


def of_unit_length(x: Tensor, eps: float) -> Tensor:
    """Return x divided by its length along the last axis; `eps` is added to the squared length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def kept_share(a: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Return the share of its state that a head keeps from one token to the next, g, `[batch pos head]`.

    Args:
        a: the projected time step, `[batch pos head]`.
        log_rate: A, the logarithm of the decay rate, `[head]`.
        bias: dt, which is added to the time step, `[head]`.
    """
    return torch.exp(-log_rate.exp() * F.softplus(a + bias))


def read_states(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, corrected: Tensor, *, rule: str = DELTA, chunk: int | None = None
) -> Tensor:  # fmt: skip
    """Return o, what every token reads from the state of each head, `[batch pos head d_value]`.

    Args:
        q, k: `[batch pos head d_key]`, scaled.
        v: `[batch pos head d_value]`.
        kept: g, the share of the state that is kept, `[batch pos head]`.
        corrected: b, the share of the state's error that is corrected, of the same shape.
        rule: one of `choices.RULES`.
        chunk: the number of tokens after which the state is reset to 0; None for never.
    """
    batch, length, heads, width = k.shape
    state = k.new_zeros(batch, heads, width, v.shape[-1])
    kept = torch.ones_like(kept) if rule == UNDECAYED else kept
    read = []
    for at in range(length):
        if chunk is not None and at % chunk == 0:
            state = torch.zeros_like(state)
        state = state * kept[:, at, :, None, None]
        new = v[:, at]
        if rule != DECAYED:
            new = new - einsum(state, k[:, at], "batch head d_key d_value, batch head d_key -> batch head d_value")
        new = new * corrected[:, at, :, None]
        state = state + einsum(k[:, at], new, "batch head d_key, batch head d_value -> batch head d_key d_value")
        read.append(einsum(state, q[:, at], "batch head d_key d_value, batch head d_key -> batch head d_value"))
    return torch.stack(read, 1)


def shared(x: Tensor, heads: int) -> Tensor:
    """Return queries or keys `[batch pos key_head d_key]`, repeated so that there is one for each of `heads` heads."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, *, eps: float, order: str) -> Tensor:
    """Return the normalised and gated output of each head, `[batch pos head d_value]`.

    `gate` has the same shape and has been through its activation. `order` is one of `choices.GATE_ORDERS`.
    """
    if order == GATE_ORDERS[1]:
        return norms.norm(out * gate, weight, None, norms.Norm(eps=eps))
    return norms.norm(out, weight, None, norms.Norm(eps=eps)) * gate
