"""Weights with the statistics of trained checkpoints, made of a miniature's: what random weights do not have and fits must bear.

Embeddings share a direction, and their spectrum and norms are uneven; a few channels of the stream outweigh all others; the MLP
of the first block makes a huge number out of BOS, which every later query then attends to (a sink); norm weights spread over
orders of magnitude; projections are close to singular. The seed decides which channels. What an architecture has no part for
(a dense MLP, BOS in the vocabulary, queries and keys that are projected from the stream) is left as it was.
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
"""Channels of the stream that stand out: the first holds BOS, the second the massive activation, the others are loud everywhere."""
QUIET = 0.1
"""The first two where nothing makes them loud, over other channels."""
LEAST = 0.3
"""Rms of an embedding behind its own factor, so that blocks do not drown it: the shared direction is seen by every block."""
OUTLIER_GAIN = 8.0
"""An outlier channel over the others, as in OPT and Llama checkpoints (6 to 20)."""
SHARED = 1.0
"""The direction that all embeddings share over what is each token's own: a cosine of one half between tokens."""
TOKEN_SPREAD, NORM_SPREAD = 0.6, 0.7
"""Log-normal spread of token norms and of norm weights."""
DECAY, SMALLEST, SHARE_SMALLEST = 0.7, 1e-4, 0.1
"""Singular values fall as i^-DECAY; a tenth of them is a ten-thousandth of that."""
BOS_GAIN = 50.0
"""BOS in its channel, over the rms of an embedding: its normalised vector is then nearly that channel alone."""
MASSIVE = 100.0
"""The massive activation over the rms of the stream behind the first block; checkpoints have 100 to 10,000 times its median."""
BLOCK = 1.0
"""What a block adds to the stream, about."""
PRE = 3.0
"""What the neuron that knows BOS is given of it."""
SINK = 2.5
"""Queries and keys along the sink's direction: their product over the root of d_head is then a few nats."""
PROJECTIONS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
WRITERS = ("attn.o", "mlp.down")
NORMS = ("norm.ln1", "norm.ln2", "norm.ln1_post", "norm.ln2_post")

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What blocks have to know of the stream: its odd channels, the shared direction, and its usual size."""

    channels: list[int]
    shared: Tensor
    rms: float
    """Behind the first block."""


class Parts:
    """The parameters of a model by role, of one block or of the whole; a change is written back where the part lies."""

    def __init__(self, model: nn.Module, taps: Mapping[str, WeightTap]) -> None:
        self._parameters, self._taps = dict(model.named_parameters(remove_duplicate=False)), taps

    def change(self, role: str, by: Change) -> None:
        """Replace a part by what `by` makes of it; parts that the model does not have are passed over."""
        tap = self._taps.get(role)
        parameter = None if tap is None else self._parameters.get(tap.path)
        if tap is None or parameter is None:
            return
        places = laid_out(torch.arange(parameter.numel()).view(parameter.shape), tap)
        flat = parameter.data.view(-1)
        flat[places.reshape(-1)] = by(flat[places]).reshape(-1)

    def has(self, role: str) -> bool:
        """Whether the model has this part."""
        return role in self._taps and self._taps[role].path in self._parameters


def make_real(model: nn.Module, spec: Spec, config: Mapping[str, Any], *, seed: int) -> None:
    """Change a drawn model in place."""
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
    """A matrix of the same size and directions whose singular values fall as a power, the last of them to almost nothing."""
    if weight.ndim != 2:
        return weight
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    falling = torch.arange(1, len(s) + 1, dtype=s.dtype) ** -DECAY
    falling[len(s) - int(SHARE_SMALLEST * len(s)) :] *= SMALLEST
    made: Tensor = (u * (falling * s.norm() / falling.norm()) @ v).to(weight.dtype)
    return made


def _embeddings(whole: Parts, d_model: int, scale: float, seed: int) -> Stream:
    """Token embeddings with a shared direction, an uneven spectrum and norms, loud channels, and BOS nearly one channel alone."""
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
    """One neuron that reads the channel of BOS and writes a huge number into another channel."""
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
    """Queries that all look for what the massive activation makes of its key, along a direction that hardly turns with position."""
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
    """The final norm takes back what is loud, as it does in checkpoints."""
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
