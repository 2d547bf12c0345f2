"""What is damaged is set aside, with a message on stderr, so that it can be made again and still be looked at."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from parity_audit.cache.root import cache_root

LOG = logging.getLogger("parity_audit")


def aside_root() -> Path:
    """Where damaged things are put; `parity-audit cache prune` deletes them."""
    return cache_root() / "set-aside"


def set_aside(path: Path, *, what: str, why: str, then: str = "made again") -> Path:
    """Move a file or folder of the cache out of the way, and say so.

    Args:
        what: the kind of thing, for the message: "miniature", "capture", "environment".
        then: what follows, for the message.
    """
    root = aside_root()
    root.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(dir=root, prefix=f"{what}-")) / path.name
    os.rename(path, target)
    LOG.warning("parity-audit: the %s %s is damaged (%s): set aside as %s, and %s", what, path.name, why, target, then)
    return target
