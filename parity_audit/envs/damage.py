"""Check that the files of an environment are those that its packages were installed with.

Every installed package has a RECORD with the sha256 and size of each of its files. Sizes are compared before an
environment is used, which takes a fraction of a second; hashes are compared after it was made, and after a failure of a
program that runs in it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Collection
from pathlib import Path

from parity_audit.cache.contents import BLOCK_BYTES

RECORDS = "lib/python*/site-packages/*.dist-info/RECORD"


def damage(folder: Path, *, whole: bool, accepted: Collection[str] = ()) -> dict[str, str]:
    """Return what is wrong with each damaged file, by its path; empty if no file is damaged.

    A file that two packages list is right if it matches either of them.

    Args:
        whole: compare hashes, and not only sizes.
        accepted: files that differ in a fresh installation too, and that are therefore not reported.
    """
    expected: dict[Path, set[tuple[str, int]]] = {}
    wrong: dict[str, str] = {}
    for record in sorted(folder.glob(RECORDS)):
        try:
            rows = [row for row in csv.reader(record.read_text().splitlines()) if row]
        except (OSError, UnicodeDecodeError, csv.Error):
            rows = []
        if not rows or any(len(row) != 3 for row in rows):
            wrong[f"{record.parent.name}/RECORD"] = "is cut off, or cannot be read"
            continue
        for name, digest, size in rows:
            if digest.startswith("sha256=") and size.isdigit():
                expected.setdefault(record.parents[1] / name, set()).add((digest, int(size)))
    for path, known in expected.items():
        why = _wrong(path, known, whole=whole)
        if why:
            wrong[path.relative_to(folder).as_posix()] = why
    return {name: why for name, why in wrong.items() if name not in accepted}


def in_words(wrong: dict[str, str]) -> str:
    """Return the first damaged file and what is wrong with it; empty if there is none."""
    return next((f"{name} {why}" for name, why in sorted(wrong.items())), "")


def _wrong(path: Path, known: set[tuple[str, int]], *, whole: bool) -> str:
    try:
        size = path.stat().st_size
        if size not in {bytes_ for _, bytes_ in known}:
            return f"has {size} bytes and not {min(bytes_ for _, bytes_ in known)}"
        return "was altered" if whole and _digest(path) not in {digest for digest, _ in known} else ""
    except OSError:
        return "is missing"


def _digest(path: Path) -> str:
    """Return the sha256 of a file in the notation of RECORD."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}"
