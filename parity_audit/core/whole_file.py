"""Write files completely or not at all, however the writing process ends."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file (text in UTF-8), replacing an existing one; missing parent directories are created.

    Raises:
        OSError: the disk is full or read-only; an existing file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")  # several processes may write the same file at once
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
