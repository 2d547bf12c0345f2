"""Fingerprint of a tensor: a hash, its root mean square, and inner products that change under any permutation of its numbers."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from parity_audit.core.errors import BackendFailed
from parity_audit.core.types import WeightPrint

FREQUENCIES = (2.0, 3.0, 5.0, 7.0)
"""The squares of the waves' frequencies: the frequencies themselves are irrational and have no common multiple."""
SKETCHES = len(FREQUENCIES)
FOLD, BLOCK_ROWS = 4096, 64
"""The number of entries in a row of a folded tensor, and the number of rows converted at a time: 2 MiB in float64."""


def fingerprint(name: str, value: Tensor) -> WeightPrint:
    """Return the hash, the root mean square and the sketch of a tensor in float32.

    The tensor is converted one block at a time, so that no float32 copy of a whole narrower tensor is made. For the sketch, the flat
    tensor is folded into rows; the sketch is its inner product with products of a row wave and a column wave of irrational
    frequencies, divided by its norm. It is cheap, reproducible without a random generator, and changed by any permutation.

    Raises:
        BackendFailed: the tensor holds NaN or infinity.
    """
    digest, flat = hashlib.sha256(), value.flatten()
    columns = _waves(torch.arange(FOLD))
    square, products = 0.0, torch.zeros(SKETCHES, dtype=torch.float64)
    for number, block in enumerate(torch.split(flat, FOLD * BLOCK_ROWS)):
        block = block.to(torch.float32)
        digest.update(block.numpy())  # type: ignore[arg-type]
        rows = F.pad(block, (0, -len(block) % FOLD)).double().view(-1, FOLD)
        square += float(rows.flatten() @ rows.flatten())
        products += ((rows @ columns) * _waves(number * BLOCK_ROWS + torch.arange(len(rows)) + 1)).sum(0)
    if not math.isfinite(square):
        bad = value.numel() - int(value.isfinite().sum())
        raise BackendFailed(f"{name} holds {bad} NaN or infinite numbers", code="non-finite-weights")
    norm = math.sqrt(square)
    sketch = tuple(float(product) / norm if norm else 0.0 for product in products)
    return WeightPrint(
        name=name,
        shape=tuple(value.shape),
        sha256=digest.hexdigest(),
        rms=norm / math.sqrt(max(flat.numel(), 1)),
        sketch=sketch,
    )


def _waves(index: Tensor) -> Tensor:
    """Return one wave of irrational frequency per column, `[index SKETCHES]`."""
    frequencies = torch.tensor(FREQUENCIES, dtype=torch.float64).sqrt()
    return torch.cos(index.double()[:, None] * frequencies)
