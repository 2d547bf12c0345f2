"""Move damaged files out of the way, with a message on stderr, so that they can be made again and still be examined."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from parity_audit.cache.root import cache_root

LOG = logging.getLogger("parity_audit")


def aside_root() -> Path:
    """Return the directory for damaged files and folders; `parity-audit cache prune` deletes its content."""
    return cache_root() / "set-aside"


def set_aside(path: Path, *, what: str, why: str, then: str = "made again") -> Path:
    """Move a damaged file or folder of the cache to `aside_root`, log a warning, and return its new path.

    Args:
        what: the kind of file for the message, such as "miniature", "capture" or "environment".
        why: the damage, for the message.
        then: what is done next, for the message.
    """
    root = aside_root()
    root.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(dir=root, prefix=f"{what}-")) / path.name
    os.rename(path, target)
    LOG.warning("parity-audit: the %s %s is damaged (%s): set aside as %s, and %s", what, path.name, why, target, then)
    return target
