"""Small text files in the cache that only save time: a missing one is made again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from parity_audit.core.whole_file import write_whole


def keep_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all. Errors are ignored: an unwritable cache only costs a few seconds per command."""
    with contextlib.suppress(OSError):
        write_whole(path, text)
