"""Small texts in the cache that save time where they are there, and are made again where they are not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def keep_text(path: Path, text: str) -> None:
    """Write a text whole or not at all. A cache that cannot be written costs some seconds a command and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(text)
        os.replace(part, path)
