"""Change the weights of a miniature so that they have the statistics of trained checkpoints, which random weights lack.

The fits have to work with such weights too. Embeddings share a direction, and their spectrum and norms are uneven. A
few channels of the residual stream are much larger than all others. The MLP of the first block turns BOS into a huge
activation, to which every later query attends (an attention sink). Norm weights spread over orders of magnitude, and
projections are close to singular. The seed decides which channels are used. A change is left out if the architecture
has no part for it (a dense MLP, BOS in the vocabulary, queries and keys that are projected from the residual stream).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.core.types import KnobValue, WeightTap
from parity_audit.formulas.stored import laid_out
from parity_audit.specs.schema import Spec
from parity_audit.specs.tokenizer import BOS
from parity_audit.specs.view import dims, roles, spec_values

OUTLIERS = 5
"""The number of outlier channels of the residual stream. The first marks BOS, the second carries the massive
activation, and the others are large for every token."""
QUIET = 0.1
"""The factor on the first two outlier channels, which makes them small except where BOS or the massive activation is."""
LEAST = 0.3
"""The smallest rms of the embeddings after their scale factor. With it the blocks do not hide the embeddings, so every
block sees the direction that they share."""
OUTLIER_GAIN = 8.0
"""The size of an outlier channel relative to the others, as in OPT and Llama checkpoints (6 to 20)."""
SHARED = 1.0
"""The norm of the component that all embeddings share, relative to that of the token's own part: at 1, the cosine
between two tokens is one half."""
TOKEN_SPREAD, NORM_SPREAD = 0.6, 0.7
"""The log-normal spread of token norms, and that of norm weights."""
DECAY, SMALLEST, SHARE_SMALLEST = 0.7, 1e-4, 0.1
"""Singular value number i is proportional to i^-DECAY; the last tenth of them is multiplied by 1e-4 in addition."""
BOS_GAIN = 50.0
"""The value of BOS in its channel, relative to the rms of an embedding: after normalisation almost only this channel is left."""
MASSIVE = 100.0
"""The massive activation relative to the rms of the residual stream after the first block; checkpoints have 100 to
10,000 times the median of the stream."""
BLOCK = 1.0
"""The approximate rms of what a block adds to the residual stream."""
PRE = 3.0
"""The pre-activation, for BOS, of the neuron that detects BOS."""
SINK = 2.5
"""The strength of queries and keys along the direction of the sink: their product divided by sqrt(d_head) is then a few nats."""
PROJECTIONS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
WRITERS = ("attn.o", "mlp.down")
NORMS = ("norm.ln1", "norm.ln2", "norm.ln1_post", "norm.ln2_post")

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Properties of the residual stream that the blocks use: its outlier channels, the shared direction of embeddings, its rms."""

    channels: list[int]
    shared: Tensor
    rms: float
    """The expected rms of the stream after the first block."""


class Parts:
    """The parameters of one block, or those outside the blocks, by role; changes are written into the parameters themselves."""

    def __init__(self, model: nn.Module, taps: Mapping[str, WeightTap]) -> None:
        self._parameters, self._taps = dict(model.named_parameters(remove_duplicate=False)), taps

    def change(self, role: str, by: Change) -> None:
        """Replace the parameter part with this role by the result of `by`; do nothing if the model has no such part."""
        tap = self._taps.get(role)
        parameter = None if tap is None else self._parameters.get(tap.path)
        if tap is None or parameter is None:
            return
        places = laid_out(torch.arange(parameter.numel()).view(parameter.shape), tap)
        flat = parameter.data.view(-1)
        flat[places.reshape(-1)] = by(flat[places]).reshape(-1)

    def has(self, role: str) -> bool:
        """Return whether the model has a parameter with this role."""
        return role in self._taps and self._taps[role].path in self._parameters


def make_real(model: nn.Module, spec: Spec, config: Mapping[str, Any], *, seed: int) -> None:
    """Give the weights of a randomly drawn model the statistics of trained weights, in place."""
    sizes, values = dims(spec, config), spec_values(spec, config)
    offset, scale = (_number(values.get(name), usual) for name, usual in (("norm.offset", 0.0), ("embed.scale", 1.0)))
    whole = Parts(model, roles(spec, config, None))
    stream = _embeddings(whole, sizes["d_model"], scale, seed)
    whole.change("norm.final", lambda w: _quiet(w, offset, stream.channels))
    for layer in range(sizes["n_layers"]):
        block = Parts(model, roles(spec, config, layer))
        for role in PROJECTIONS:
            block.change(role, near_singular)
        for role in WRITERS:
            block.change(role, lambda w: _uneven_rows(w, stream.channels))
        for role in NORMS:
            block.change(role, partial(_uneven, offset=offset, seed=seed, name=f"{layer}{role}"))
        if layer:
            _sink(block, stream, sizes["d_head"])
        else:
            _massive(block, stream, offset)


def near_singular(weight: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and Frobenius norm, but singular values that decrease as a power law.

    The last tenth of the singular values is almost 0. A weight that is not a matrix is returned unchanged.
    """
    if weight.ndim != 2:
        return weight
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    falling = torch.arange(1, len(s) + 1, dtype=s.dtype) ** -DECAY
    falling[len(s) - int(SHARE_SMALLEST * len(s)) :] *= SMALLEST
    made: Tensor = (u * (falling * s.norm() / falling.norm()) @ v).to(weight.dtype)
    return made


def _embeddings(whole: Parts, d_model: int, scale: float, seed: int) -> Stream:
    """Change the token embeddings, and return the resulting properties of the residual stream.

    The embeddings get a shared direction, an uneven spectrum, uneven norms and outlier channels; BOS gets almost only
    one channel.
    """
    channels = torch.randperm(d_model, generator=_generator(seed, "channels"))[:OUTLIERS].tolist()
    shared = _noise(d_model, seed, "shared")
    shared[channels] = 0.0
    shared /= shared.norm()
    kept: list[float] = []

    def embedding(e: Tensor) -> Tensor:
        usual = float(e.square().mean().sqrt())
        rms = max(usual, LEAST / scale)
        e = near_singular(e) * (rms / usual) + rms * SHARED * d_model**0.5 * shared
        e = e * (TOKEN_SPREAD * _noise(len(e), seed, "tokens")).exp()[:, None]
        e[:, channels[:2]] *= QUIET
        e[:, channels[2:]] *= OUTLIER_GAIN
        e[BOS] *= QUIET
        e[BOS, channels[0]] = BOS_GAIN * rms
        kept.append(rms)
        return e

    whole.change("embed", embedding)
    return Stream(channels=channels, shared=shared, rms=math.hypot(BLOCK, scale * sum(kept)))


def _massive(block: Parts, stream: Stream, offset: float) -> None:
    """Make one neuron of this block's MLP read the channel of BOS and write a huge activation into another channel."""
    source, target = stream.channels[:2]

    def reads(weight: Tensor) -> Tensor:
        weight[0] = 0.0
        weight[0, source] = PRE / weight.shape[1] ** 0.5
        return weight

    def writes(weight: Tensor) -> Tensor:
        weight[target] = 0.0
        weight[target, 0] = MASSIVE * stream.rms / PRE
        return weight

    def passes(weight: Tensor) -> Tensor:
        weight[target] = MASSIVE * stream.rms / len(weight) ** 0.5 - offset
        return weight

    def one(weight: Tensor) -> Tensor:
        weight[source] = 1.0 - offset
        return weight

    block.change("norm.ln2", one)
    for role in ("mlp.gate", "mlp.up"):
        block.change(role, reads)
    block.change("mlp.down", writes)
    block.change("norm.ln2_post", passes)


def _sink(block: Parts, stream: Stream, d_head: int) -> None:
    """Make every query attend to the key of the massive activation, by means of the rotary dimension with the lowest frequency.

    That dimension hardly rotates with position, so the sink acts at every distance. Latent attention is left as it is.
    """
    slowest = d_head // 2 - 1
    strength = SINK * d_head**0.25

    def looks(weight: Tensor) -> Tensor:
        weight[slowest::d_head] += strength * stream.shared
        return weight

    def shows(weight: Tensor) -> Tensor:
        weight[slowest::d_head, stream.channels[1]] += strength / weight.shape[1] ** 0.5
        return weight

    if block.has("attn.q") and block.has("attn.k") and not block.has("norm.kv_latent"):
        block.change("attn.q", looks)
        block.change("attn.k", shows)


def _uneven_rows(weight: Tensor, channels: list[int]) -> Tensor:
    weight[channels[:2]] *= QUIET
    weight[channels[2:]] *= OUTLIER_GAIN
    return weight


def _quiet(weight: Tensor, offset: float, channels: list[int]) -> Tensor:
    """Return the final norm's weight, divided by `OUTLIER_GAIN` in the outlier channels: checkpoints also reduce them there."""
    weight[channels] = (weight[channels] + offset) / OUTLIER_GAIN - offset
    return weight


def _uneven(weight: Tensor, offset: float, seed: int, name: str) -> Tensor:
    return (weight + offset) * (NORM_SPREAD * _noise(len(weight), seed, name)).exp() - offset


def _number(value: KnobValue, usual: float) -> float:
    return float(value) if isinstance(value, (int, float)) else usual


def _noise(size: int, seed: int, name: str) -> Tensor:
    return torch.randn(size, generator=_generator(seed, name))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"real:{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
