"""What the user's hub cache holds of a model."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAIN = "main"
COMMIT = re.compile("[0-9a-f]{40}")


def hub_cache() -> Path:
    """The user's hub cache, where the hub library itself would look."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"


def cached_repository(repo_id: str) -> Path:
    """Where the cache keeps a model, whether or not it has it."""
    return hub_cache() / f"models--{repo_id.replace('/', '--')}"


def cached_snapshot(repo_id: str, revision: str = "") -> Path | None:
    """The snapshot directory of a model that holds a config.json; a branch or tag is the commit that it was last seen at."""
    root = cached_repository(repo_id)
    commit = revision
    if not COMMIT.fullmatch(revision):
        try:
            commit = (root / "refs" / (revision or MAIN)).read_text().strip()
        except OSError:
            return None
    snapshot = root / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def commit_of(snapshot: Path) -> str:
    """The commit of a snapshot directory; "" for any other directory."""
    return snapshot.name if snapshot.parent.name == "snapshots" and COMMIT.fullmatch(snapshot.name) else ""
