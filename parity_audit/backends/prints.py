"""Fingerprints of live parameters, in the checkpoint's own layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.backends.paths import get
from parity_audit.core.types import WeightPrint, WeightTap
from parity_audit.core.wire import WeightsRequest

SKETCHES = 4


def fingerprints(root: Any, request: WeightsRequest) -> Iterator[WeightPrint]:
    """One fingerprint per tap; a path the model does not have is left out, and the parent reports the gap."""
    for tap in request.taps:
        try:
            value = get(root, tap.path)
        except LookupError:
            continue
        if isinstance(value, Tensor):
            yield fingerprint(tap.name, canonical(value, tap))


def canonical(value: Tensor, tap: WeightTap) -> Tensor:
    """The tensor as the checkpoint stores it: float32 on the CPU, sliced, laid out, scaled and shifted back."""
    value = value.detach().to("cpu", torch.float32)
    if tap.slice is not None:
        value = value[tap.slice[0] : tap.slice[1]]
    if tap.layout:
        value = rearrange(value, tap.layout, **tap.sizes)
    if tap.scale is not None:
        value = value * tap.scale
    if tap.shift is not None:
        value = value + tap.shift
    return value.contiguous()


def fingerprint(name: str, value: Tensor) -> WeightPrint:
    """Hash, rms and sketch of one float32 tensor.

    The sketch is the tensor's inner product with waves of irrational frequency over the flat index,
    over its norm: cheap, reproducible without a generator, and changed by any permutation.
    """
    digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    flat = value.flatten().double()
    norm = float(flat.norm())
    index = torch.arange(flat.numel(), dtype=torch.float64)
    waves = (torch.cos(index * math.sqrt(prime)) for prime in (2, 3, 5, 7)[:SKETCHES])
    sketch = tuple(float(flat @ wave) / norm if norm else 0.0 for wave in waves)
    return WeightPrint(
        name=name, shape=tuple(value.shape), sha256=digest, rms=norm / math.sqrt(max(flat.numel(), 1)), sketch=sketch
    )
