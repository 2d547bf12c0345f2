"""Alternating updates: several streams of which a block computes on one, and predicts and corrects the others (Gemma 3n).

    x_i = P_i x |x| / max(|P_i x|, floor)                             the streams i > 0 that enter the first block; x_0 = x
    m(y) = tanh(M (norm(y) s))                                        one number per stream, of one stream y
    predicted_i = x_i + sum_j A(m)_ij x_j,     A(m) = m(x_a) W_p      a the active stream
    corrected_i = predicted_i + (1 + W_c m(y))_i (y - predicted_a)    y what the block made of predicted_a
    combined = mean over i of x_i, U_i x_i |x_0| / max(|U_i x_i|, floor) for i > 0

|x| is the root mean square over the components of a token.

Sources: arXiv 2301.13310, transformers modeling_gemma3n.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from parity_audit.formulas.projections import project


def of_size(x: Tensor, like: Tensor, floor: float | None) -> Tensor:
    """x `[batch pos d_model]` with the root mean square of `like`, of the same shape.

    Args:
        floor: the least mean square of x that it is divided by; None for no floor.
    """
    mean = x.square().mean(-1, keepdim=True)
    mean = mean if floor is None else mean.clamp_min(floor)
    return x * like.square().mean(-1, keepdim=True).sqrt() / mean.sqrt()


def expanded(x: Tensor, projections: Sequence[Tensor], floor: float | None) -> Tensor:
    """The streams `[batch pos stream d_model]` that token embeddings x `[batch pos d_model]` begin.

    Args:
        projections: of each stream but the first, `[d_model d_model]`.
        floor: as in `of_size`.
    """
    others = [of_size(project(x, weight), x, floor) for weight in projections]
    return torch.stack([x, *others], dim=-2)


def combined(streams: Tensor, projections: Sequence[Tensor], floor: float | None) -> Tensor:
    """The mean `[batch pos d_model]` of the streams `[batch pos stream d_model]`, all but the first projected and brought to
    the size of the first; arguments as in `expanded`."""
    first, *rest = streams.unbind(-2)
    others = [of_size(project(x, weight), first, floor) for x, weight in zip(rest, projections, strict=True)]
    return torch.stack([first, *others]).mean(0)


def limited(weight: Tensor, limit: float | None) -> Tensor:
    """Weights of coefficients clamped to [-limit, limit]; None for no limit."""
    return weight if limit is None else weight.clamp(-limit, limit)


def predicted(streams: Tensor, modalities: Tensor, weight: Tensor) -> Tensor:
    """The streams `[batch pos stream d_model]` plus a mixture of them.

    Args:
        streams: of the same shape.
        modalities: m of the active stream, `[batch pos stream]`.
        weight: of the coefficients, `[(stream_out stream_in) stream]`.
    """
    coefficients = rearrange(
        project(modalities, weight), "batch pos (out stream) -> batch pos out stream", stream=streams.shape[-2]
    )
    mixed = einsum(coefficients, streams, "batch pos out stream, batch pos stream d_model -> batch pos out d_model")
    return streams + mixed


def corrected(streams: Tensor, made: Tensor, active: int, modalities: Tensor, weight: Tensor, offset: float) -> Tensor:
    """Every stream `[batch pos stream d_model]` plus its share of the active one's error.

    Args:
        streams: what was predicted, of the same shape.
        made: what the block made of the active stream, `[batch pos d_model]`.
        active: the index of the active stream.
        modalities: m of what was made, `[batch pos stream]`.
        weight: of the shares, `[stream stream]`.
        offset: what is added to each share.
    """
    error = made - streams[..., active, :]
    shares = project(modalities, weight) + offset
    return streams + einsum(shares, error, "batch pos stream, batch pos d_model -> batch pos stream d_model")
