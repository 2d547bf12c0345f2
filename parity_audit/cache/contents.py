"""Hash every file of a folder, and compare two sets of such hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

BLOCK_BYTES = 1 << 20
"""The bytes to read at once while hashing: enough that most of the time is spent on the hash and not on the calls."""


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, which is read one block at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file in a folder and its subfolders, by relative path.

    For a link or a special file, the value is "not a plain file" instead of a hash.
    """
    found: dict[str, str] = {}
    for root, folders, files in os.walk(folder):
        for name in (*files, *(item for item in folders if Path(root, item).is_symlink())):
            path = Path(root, name)
            plain = path.is_file() and not path.is_symlink()
            found[path.relative_to(folder).as_posix()] = sha256_of(path) if plain else "not a plain file"
    return found


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return the first file that is missing, new or altered, in words; empty if there is none."""
    for name in sorted({*found, *expected}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is new"
        if found[name] != expected[name]:
            return f"{name} was altered"
    return ""
