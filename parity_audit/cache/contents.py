"""What is in a folder, file by file, and what changed since."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

BLOCK_BYTES = 1 << 20
"""Read at once while hashing: large enough that the hash and not the calls takes the time."""


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, read a block at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder by its relative path; a link or special file is told by its kind."""
    found: dict[str, str] = {}
    for root, folders, files in os.walk(folder):
        for name in (*files, *(item for item in folders if Path(root, item).is_symlink())):
            path = Path(root, name)
            plain = path.is_file() and not path.is_symlink()
            found[path.relative_to(folder).as_posix()] = sha256_of(path) if plain else "not a plain file"
    return found


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """The first file that is missing, new or altered, in words; empty when nothing is."""
    for name in sorted({*found, *expected}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is new"
        if found[name] != expected[name]:
            return f"{name} was altered"
    return ""
