"""The location of the cache directory, which holds environments, synthetic checkpoints and captures of unfinished audits."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """Return `$PARITY_AUDIT_CACHE` if it is set, else the platform's cache directory for parity-audit."""
    given = os.environ.get("PARITY_AUDIT_CACHE")
    return Path(given).expanduser().resolve() if given else user_cache_path("parity-audit")
