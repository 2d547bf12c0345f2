"""Write and read sites inside a worker: one file per tensor.

Files are in the safetensors format and are written one block at a time. The tensors can be large (the logits of
a long probe), and the usual writer would hold two more copies of each of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from parity_audit.core.manifest import Entry
from parity_audit.core.sites import RETURNED
from parity_audit.core.wire import RunRequest

TENSOR = "x"
MASKED_BELOW = -1e30
BELOW_THE_TOP = 4096.0
"""A score that lies at least this far below the largest score of its row counts as masked.

Programs mask by adding -1e4 or less. exp(-4096) is 0 in every dtype, float64 included, so a score that was not masked
and is taken for masked does not change the softmax.
"""
BLOCK_NUMBERS = 1 << 18
"""Numbers of one block: few enough that it stays in the processor's cache while it is checked, hashed and written."""
FORMAT_NAMES = {torch.float32: "F32", torch.float64: "F64"}


def write_site(request: RunRequest, site: str, value: Tensor, dtype: torch.dtype) -> Entry:
    """Write one site in `dtype` (float32 or float64) below `request.out` and return its manifest entry."""
    masked = site.endswith("attn_scores")  # the site `attn_scores` and the hook `hook_attn_scores`
    name = f"{request.probe.name}/{site}.safetensors"
    path = Path(request.out) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    header, bad = _header(value, dtype), 0
    digest = hashlib.sha256(header)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(header)
        for block in _blocks(value, dtype, masked=masked):
            bad += _non_finite(block, masked=masked)
            data = block.numpy().data.cast("B")
            digest.update(data)
            file.write(data)
    os.replace(part, path)
    return Entry(
        probe=request.probe.name, site=site, file=name, shape=tuple(value.shape),
        dtype=str(dtype).removeprefix("torch."), sha256=digest.hexdigest(), non_finite=bad,
    )  # fmt: skip


def write_returned(request: RunRequest, value: Tensor, dtype: torch.dtype, hooked: Entry | None) -> Entry:
    """Write the logits that the model returned; if they equal the `hooked` logits bit for bit, reuse that file."""
    if hooked is not None and hooked.sha256 == _digest(value, dtype):
        return replace(hooked, site=RETURNED)
    return write_site(request, RETURNED, value, dtype)


def _digest(value: Tensor, dtype: torch.dtype) -> str:
    """Return the hash of the file that `write_site` would write."""
    digest = hashlib.sha256(_header(value, dtype))
    for block in _blocks(value, dtype, masked=False):
        digest.update(block.numpy().data.cast("B"))
    return digest.hexdigest()


def _header(value: Tensor, dtype: torch.dtype) -> bytes:
    """Return the safetensors header of one tensor: its length in 8 bytes, then JSON padded to a multiple of 8 bytes."""
    size = value.numel() * dtype.itemsize
    entry = {"dtype": FORMAT_NAMES[dtype], "shape": list(value.shape), "data_offsets": [0, size]}
    text = json.dumps({TENSOR: entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(value: Tensor, dtype: torch.dtype, *, masked: bool) -> Iterator[Tensor]:
    """Yield the numbers of a tensor in order, on the CPU, one block at a time.

    If `masked` is true, the tensor holds attention scores: blocks are whole rows, and masked scores become -inf.
    """
    flat = value.detach().reshape(-1)
    if not masked:
        yield from (block.to("cpu", dtype) for block in flat.split(BLOCK_NUMBERS))
        return
    keys = max(value.shape[-1], 1)
    for rows in flat.reshape(-1, keys).split(max(BLOCK_NUMBERS // keys, 1)):
        yield masked_as_infinity(rows).to("cpu", dtype).reshape(-1)


def _non_finite(block: Tensor, *, masked: bool) -> int:
    """Return how many numbers are NaN or infinite; in `masked` scores -inf does not count, since it marks masked ones."""
    if not masked and math.isfinite(float(block @ block)):
        return 0
    good = block.isfinite() | block.isneginf() if masked else block.isfinite()
    return block.numel() - int(good.sum())


def masked_as_infinity(scores: Tensor) -> Tensor:
    """Return scores `[... query key]` with the masked ones set to -inf.

    Programs write or add a large negative number instead of -inf.
    """
    limit = max(torch.finfo(scores.dtype).min / 2, MASKED_BELOW)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, float("-inf"))
    return scores.masked_fill((scores <= limit) | (scores <= top - BELOW_THE_TOP), float("-inf"))


def read_input(path: str) -> Tensor:
    """Read a tensor that a replay puts in place of a site."""
    return load_file(path)[TENSOR]
