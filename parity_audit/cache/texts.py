"""Small texts in the cache that save time where they are there, and are made again where they are not."""

from __future__ import annotations

import contextlib
from pathlib import Path

from parity_audit.core.whole_file import write_whole


def keep_text(path: Path, text: str) -> None:
    """Write a text whole or not at all. A cache that cannot be written costs some seconds a command and nothing else."""
    with contextlib.suppress(OSError):
        write_whole(path, text)
