"""Draw random weights with which every wrong constant changes the output.

The distribution depends on the kind of a parameter, which follows from its module and its name. Norm weights are
random, biases and attention sinks are not zero, attention scores are large enough for a soft-cap to act, the inputs of
some norms are small enough for eps to matter, token norms differ, and the key/value heads of grouped-query attention
differ, so that a wrong grouping is visible.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from math import prod, sqrt

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.frequencies import default_table

SLOW_ENOUGH = 0.02  # radians per position: faster rotary pairs are drawn with a smaller amplitude

FACTOR = "factor"
"""The kind of a parameter that multiplies something: it is drawn around 1, with its scale as the spread."""
DEFAULT_SCALES = {
    "embed": 0.05,        # rms of a token's embedding before the token's own factor
    "embed_spread": 0.3,  # log-normal spread of token norms; if all norms were equal, a wrong eps would look like a wrong scale
    "pos_embed": 0.05,
    "qk": 1.1,            # rms of queries and keys; the standard deviation of scores is its square
    "v": 1.0,
    "o": 0.3,             # rms of the attention output that is added to the residual stream
    "mlp_pre": 1.5,
    "mlp_out": 0.3,
    "router": 2.0,
    "bias": 0.2,
    "sinks": 1.0,
    "norm_mean": 1.0,
    "norm_spread": 0.25,
    "final_norm_mean": 0.3,
    "post_norm_mean": 1.0,
}  # fmt: skip

# (pattern, kind): the first pattern that matches a parameter's name decides; specs may put their own in front (`draws`).
KINDS: tuple[tuple[str, str], ...] = (
    (r"sinks?$", "sinks"),
    (r"(lm_head|embed_out|output_embedding)\.weight$", "embed"),
    (r"(wpe|embed_positions|position_embeddings?)\.weight$", "pos_embed"),
    (r"(wte|embed_tokens|embed_in|word_embeddings|tok_embeddings)\.weight$", "embed"),
    (r"(^|\.)(router|gate|block_sparse_moe\.gate|mlp\.gate)\.weight$", "router"),
    (r"(q_proj|k_proj|c_attn|qkv_proj|query_key_value|Wqkv|W_pack)", "qk"),
    (r"v_proj", "v"),
    (r"(attn|attention|self_attention)\.(o_proj|out_proj|c_proj|dense|wo)\.", "o"),
    (r"(down_proj|fc2|fc_out|mlp\.c_proj|dense_4h_to_h|\bw2\b)", "mlp_out"),
)


def draw(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    scales: Mapping[str, float],
    norm: str | None,
    fan_in: int,
    offset: float,
    kinds: tuple[tuple[str, str], ...] = (),
) -> Tensor:
    """Draw one parameter of `shape` in float32, reproducible from the seed and the parameter's name.

    Args:
        norm: the key in `scales` for the mean of a norm's weights ("norm_mean", ...); None for a parameter that is not
            of a norm.
        fan_in: the number of inputs of a projection.
        offset: the constant that the architecture adds to its norm weights; it is subtracted here.
        kinds: (pattern, kind) pairs that take precedence over `KINDS`.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    noise = torch.randn(
        shape, generator=(generator := torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")))
    )
    if norm is not None:
        return (
            noise * scales["bias"] if name.endswith("bias") else noise * scales["norm_spread"] + scales[norm] - offset
        )
    kind = kind_of(name, kinds)
    if kind == "embed" and name.endswith("weight"):
        factors = (scales["embed_spread"] * torch.randn(shape[0], 1, generator=generator)).exp()
        return noise * factors * scales["embed"]
    if kind in ("pos_embed", "sinks"):
        return noise * scales[kind]
    if kind == FACTOR:
        return 1.0 + noise * scales[kind]
    if name.endswith("bias"):
        return noise * scales["bias"]
    return noise * (scales[kind] / sqrt(fan_in))


def kind_of(name: str, kinds: tuple[tuple[str, str], ...] = ()) -> str:
    """Return the kind of a parameter, which is also the key of its scale; "mlp_pre" if no pattern matches its name."""
    return next((kind for pattern, kind in (*kinds, *KINDS) if re.search(pattern, name)), "mlp_pre")


def tapered(weight: Tensor, theta: float, d_head: int) -> Tensor:
    """Return query or key rows `[(head d_head), d_model]` with less energy in the fast rotary pairs, at the same rms.

    A float32 angle has an error of position times frequency times eps. At thousands of positions the rounding of the
    fastest pairs would therefore be larger than the effects to be measured. Trained models also rely mostly on the slow
    pairs there.
    """
    frequencies = torch.tensor(default_table(theta, d_head))
    amplitude = (SLOW_ENOUGH / frequencies).clamp(max=1.0).sqrt().repeat(2)
    amplitude = amplitude / amplitude.square().mean().sqrt()
    heads = rearrange(weight, "(head d_head) d_model -> head d_head d_model", d_head=d_head)
    flat: Tensor = rearrange(heads * amplitude[None, :, None], "head d_head d_model -> (head d_head) d_model")
    return flat


def inputs_of(shape: tuple[int, ...], *, transposed: bool) -> int:
    """Return the number of inputs of a projection: the last axis, or the second last if weights are stored `[in, out]`.

    A parameter with fewer than two axes counts as one input.
    """
    if len(shape) < 2:
        return 1
    return shape[-2] if transposed else prod(shape[1:]) if len(shape) == 2 else shape[-1]
