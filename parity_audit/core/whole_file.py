"""Files that are there whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, in UTF-8 where it is text, in place of one that is there; the directories above it are made.

    Raises:
        OSError: the disk is full or read-only; what was there before still is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")  # several processes may write the same file at once
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
