"""Subtract the mean over the last axis from some sites, which gives the values that a port with centred weights computes.

x - mean(x)        over d_model in the residual stream, over the vocabulary in logits
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors.torch import load_file, save_file

from parity_audit.cache.contents import sha256_of
from parity_audit.capture.sizes import FLOAT64_BYTES
from parity_audit.capture.store import TENSOR, Capture, open_capture, with_newer, write_manifest
from parity_audit.core.manifest import Entry
from parity_audit.core.sites import local_name


def centred_entries(entries: Iterable[Entry], sites: Collection[str], folder: Path) -> list[Entry]:
    """Return the entries; those of `sites` (names without blocks) point to new centred float64 files beside the original ones."""
    return [_centred(entry, folder) if local_name(entry.site) in sites else entry for entry in entries]


def centred_copy(capture: Capture, sites: Collection[str], folder: Path) -> Capture:
    """Return a copy of a capture in `folder` with the mean subtracted from these sites; its other files are linked."""
    copy = with_newer(capture, capture, folder)
    entries = tuple(centred_entries(copy.manifest.entries, sites, folder))
    write_manifest(folder, dataclasses.replace(copy.manifest, entries=entries))
    return open_capture(folder, just_written=True)


def bytes_of_copy(capture: Capture, sites: Collection[str]) -> int:
    """Return the most bytes that `centred_copy` writes."""
    return sum(
        FLOAT64_BYTES * math.prod(entry.shape) for entry in capture.manifest.entries if local_name(entry.site) in sites
    )


def _centred(entry: Entry, folder: Path) -> Entry:
    file = Path(entry.file)
    name = str(file.with_name(f"centred-{file.name}"))
    if not (folder / name).exists():  # two bit-identical sites share one file
        value = load_file(folder / file)[TENSOR].double()
        save_file({TENSOR: value - value.mean(-1, keepdim=True)}, folder / name)
    return dataclasses.replace(entry, file=name, dtype="float64", sha256=sha256_of(folder / name))
