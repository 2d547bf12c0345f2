"""Read the header of a safetensors file, and check that its entries are consistent and account for every byte of the file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from parity_audit.core.errors import NotJudged

LONGEST_HEADER = 100 << 20
"""The longest header that the format allows, in bytes."""
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
}  # fmt: skip
CHECKED_FOR_NAN = ("F16", "BF16", "F32", "F64")
BLOCK_NUMBERS = 1 << 24
AGAIN = "get the file again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Name, dtype and shape of one tensor; its data are the bytes `[start, stop)`, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_tensors(path: Path) -> list[StoredTensor]:
    """Return every tensor of a file. Only the header is read.

    Raises:
        NotJudged: it is not a safetensors file, it is truncated, or its header contradicts itself or the size of the
            file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(stream.read(length), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("its header is no mapping")
        found = [_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
        _fill(found)
    except (ValueError, RecursionError, OSError) as error:
        raise NotJudged(
            f"{path.name} is not a safetensors file: {error}", code="bad-weights", where=str(path), hint=AGAIN
        ) from error
    expected = 8 + length + max((item.stop for item in found), default=0)
    if size != expected:
        raise NotJudged(
            f"{path.name} is truncated" if size < expected else f"{path.name} has bytes its header does not know",
            code="bad-weights", where=str(path), expected=f"{expected} bytes", found=f"{size} bytes", hint=AGAIN,
        )  # fmt: skip
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in its header")
    return dict(pairs)


def _tensor(name: str, entry: Any) -> StoredTensor:
    """Return one entry of the header after checking it.

    Raises ValueError if the entry has another form, or if its number of bytes does not fit its dtype and shape.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"`{name:.80}` is described by {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"`{name:.80}` has dtype {str(dtype)[:40]}")
    if not all(_counts(value) for value in (shape, offsets)) or len(offsets) != 2:
        raise ValueError(f"`{name:.80}` has shape {str(shape)[:80]} and bytes {str(offsets)[:80]}")
    start, stop = offsets
    if 8 * (stop - start) != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"`{name:.80}`: {dtype} of shape {str(shape)[:80]} does not take {stop - start} bytes")
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), start=start, stop=stop)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _fill(tensors: list[StoredTensor]) -> None:
    """Raise ValueError if tensors overlap, or if there are unused bytes before or between them."""
    end = 0
    for item in sorted(tensors, key=lambda item: (item.start, item.stop)):
        if item.start != end:
            raise ValueError(f"`{item.name:.80}` begins at byte {item.start}, the tensor before it ends at {end}")
        end = item.stop


def check_finite(path: Path) -> None:
    """Raise an error if a floating-point tensor of a file has NaN or infinity; numbers are read one block at a time.

    Types narrower than 16 bits are not checked, because only the programs that load them know their scales.

    Raises:
        NotJudged: a tensor has NaN or infinity.
    """
    names = [item.name for item in stored_tensors(path) if item.dtype in CHECKED_FOR_NAN]
    with safe_open(path, framework="pt") as file:
        for name in names:
            blocks = file.get_tensor(name).flatten().split(BLOCK_NUMBERS)
            bad = sum(block.numel() - int(torch.isfinite(block).sum()) for block in blocks)
            if bad:
                raise NotJudged(
                    f"{name} holds {bad} NaN or infinite numbers", code="non-finite-weights", where=str(path),
                    hint="nothing can be compared with such weights; get the checkpoint again",
                )  # fmt: skip
