"""Select the safetensors files of a directory that are the model's weights, and leave out other files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from parity_audit.core.errors import NotJudged

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
OTHERS = re.compile(r"(adapter_|consolidated|original)")
"""How the names of files begin that are not weights of the model: an adapter, or the same tensors under other names."""


def chosen(names: Sequence[str], *, indexed: bool) -> tuple[str, ...]:
    """Return the weight files of the model among the safetensors files of one directory, sorted.

    If there are an index and files named like shards, these are the shards; otherwise all files except those of
    `OTHERS`.

    Args:
        names: names of files that end in `.safetensors`.
        indexed: whether the directory has an index file.
    """
    shards = tuple(sorted(name for name in names if SHARD.fullmatch(name)))
    if indexed and shards:
        return shards
    return tuple(sorted(name for name in names if not OTHERS.match(name)))


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files with the model's weights that exist in a checkpoint directory."""
    names = [path.name for path in folder.glob("*.safetensors")]
    return tuple(folder / name for name in chosen(names, indexed=(folder / INDEX).is_file()))


def shards_of(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by tensor name, as the index gives it; empty without an index.

    Raises:
        NotJudged: the index cannot be read.
    """
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NotJudged(f"{path.name} cannot be read: {error}", code="bad-weights", where=str(path)) from error


def all_there(folder: Path) -> bool:
    """Return whether a directory has every file of its weights; after an interrupted download some are missing."""
    files = weight_files(folder)
    if not files or any(not (folder / file).is_file() for file in set(shards_of(folder).values())):
        return False
    counts = [SHARD.fullmatch(file.name) for file in files]
    return all(match is None or int(match[2]) == len(files) for match in counts)
