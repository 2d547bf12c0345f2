"""One tensor, one file: how sites are written and read inside a worker."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from parity_audit.core.manifest import Entry
from parity_audit.core.wire import RunRequest

TENSOR = "x"
MASKED_BELOW = -1e30


def write_site(request: RunRequest, site: str, value: Tensor, dtype: torch.dtype) -> Entry:
    """Write one site in `dtype` below `request.out` and return its manifest entry."""
    if site.endswith(".attn_scores"):
        value = masked_as_infinity(value)
    stored = value.to("cpu", dtype, copy=True).contiguous()
    bad = ~stored.isfinite()
    if site.endswith(".attn_scores"):
        bad &= ~stored.isneginf()
    name = f"{request.probe.name}/{site}.safetensors"
    data = save({TENSOR: stored})
    _write(Path(request.out) / name, data)
    return Entry(
        probe=request.probe.name, site=site, file=name, shape=tuple(stored.shape),
        dtype=str(dtype).removeprefix("torch."), sha256=hashlib.sha256(data).hexdigest(), non_finite=int(bad.sum()),
    )  # fmt: skip


def masked_as_infinity(scores: Tensor) -> Tensor:
    """Masked scores as -inf: programs write the lowest number of their dtype, or add it, instead."""
    limit = max(torch.finfo(scores.dtype).min / 2, MASKED_BELOW)
    return scores.masked_fill(scores <= limit, float("-inf"))


def read_input(path: str) -> Tensor:
    """A tensor that a replay puts in place of a site."""
    return load_file(path)[TENSOR]


def _write(path: Path, data: bytes) -> None:
    """Write under another name first, so that a file with its final name is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
