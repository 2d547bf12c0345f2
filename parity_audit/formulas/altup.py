"""Alternating updates (Gemma 3n): a block computes on one of several streams, and predicts and corrects all of them.

    x_i = P_i x |x| / sqrt(max(|P_i x|^2, floor))                     the streams i > 0 that enter the first block; x_0 = x
    m(y) = tanh(M (norm(y) s))                                        one number per stream, computed from one stream y
    predicted_i = x_i + sum_j A(m)_ij x_j,     A(m) = m(x_a) W_p      a is the active stream
    corrected_i = predicted_i + (1 + W_c m(y))_i (y - predicted_a)    y is what the block computes from predicted_a
    combined = mean of x_0 and, for all i > 0, U_i x_i |x_0| / sqrt(max(|U_i x_i|^2, floor))

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
    """Return x `[batch pos d_model]`, rescaled per token to the root mean square of `like`, which has the same shape.

    Args:
        floor: the lower bound on the mean square of x, whose root x is divided by; None for no bound.
    """
    mean = x.square().mean(-1, keepdim=True)
    mean = mean if floor is None else mean.clamp_min(floor)
    return x * like.square().mean(-1, keepdim=True).sqrt() / mean.sqrt()


def expanded(x: Tensor, projections: Sequence[Tensor], floor: float | None) -> Tensor:
    """Return the streams that enter the first block, `[batch pos stream d_model]`, from token embeddings x `[batch pos d_model]`.

    Args:
        projections: the matrix of each stream but the first, `[d_model d_model]`.
        floor: as in `of_size`.
    """
    others = [of_size(project(x, weight), x, floor) for weight in projections]
    return torch.stack([x, *others], dim=-2)


def combined(streams: Tensor, projections: Sequence[Tensor], floor: float | None) -> Tensor:
    """Return the mean of the streams, `[batch pos d_model]` of `[batch pos stream d_model]`.

    Every stream but the first is projected and rescaled to the root mean square of the first; arguments as in `expanded`.
    """
    first, *rest = streams.unbind(-2)
    others = [of_size(project(x, weight), first, floor) for x, weight in zip(rest, projections, strict=True)]
    return torch.stack([first, *others]).mean(0)


def limited(weight: Tensor, limit: float | None) -> Tensor:
    """Return the weights of the coefficients clamped to [-limit, limit]; a limit of None clamps nothing."""
    return weight if limit is None else weight.clamp(-limit, limit)


def predicted(streams: Tensor, modalities: Tensor, weight: Tensor) -> Tensor:
    """Return the predicted streams `[batch pos stream d_model]`: each stream plus a linear combination of all streams.

    Args:
        streams: the streams that enter the block, of the same shape.
        modalities: m of the active stream, `[batch pos stream]`.
        weight: W_p, which maps m to the coefficients, `[(stream_out stream_in) stream]`.
    """
    coefficients = rearrange(
        project(modalities, weight), "batch pos (out stream) -> batch pos out stream", stream=streams.shape[-2]
    )
    mixed = einsum(coefficients, streams, "batch pos out stream, batch pos stream d_model -> batch pos out d_model")
    return streams + mixed


def corrected(streams: Tensor, made: Tensor, active: int, modalities: Tensor, weight: Tensor, offset: float) -> Tensor:
    """Return the corrected streams `[batch pos stream d_model]`: each plus its share of the active stream's prediction error.

    Args:
        streams: the predicted streams, of the same shape.
        made: what the block computes from the active predicted stream, `[batch pos d_model]`.
        active: the index of the active stream.
        modalities: m of `made`, `[batch pos stream]`.
        weight: W_c, which maps m to the shares, `[stream stream]`.
        offset: the number that is added to each share.
    """
    error = made - streams[..., active, :]
    shares = project(modalities, weight) + offset
    return streams + einsum(shares, error, "batch pos stream, batch pos d_model -> batch pos stream d_model")
