"""The cache directory: environments, synthetic checkpoints, captures of unfinished audits."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """`$PARITY_AUDIT_CACHE`, else the platform's cache directory."""
    given = os.environ.get("PARITY_AUDIT_CACHE")
    return Path(given).expanduser().resolve() if given else user_cache_path("parity-audit")
