"""Whether the files of an environment are those that its packages were installed with.

Every installed package has a RECORD: the sha256 and size of each of its files. Sizes are compared when an environment is about
to be used (a fraction of a second); hashes when it was just made, and when what runs in it fails.
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
    """What is wrong, by the name of the file; empty when nothing is. A file of two packages is right for either.

    Args:
        whole: compare hashes, and not sizes alone.
        accepted: names of files that a fresh installation has like that too.
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
    """The first file that is wrong; empty when none is."""
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
    """The sha256 of a file as RECORD writes it."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}"
