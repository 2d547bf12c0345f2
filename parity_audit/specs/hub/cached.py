"""Find models in the user's hub cache, without contacting the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAIN = "main"
COMMIT = re.compile("[0-9a-f]{40}")


def hub_cache() -> Path:
    """Return the user's hub cache, from the same environment variables as the hub library uses."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"


def cached_repository(repo_id: str) -> Path:
    """Return the directory in which the cache keeps a model, whether or not it exists."""
    return hub_cache() / f"models--{repo_id.replace('/', '--')}"


def cached_snapshot(repo_id: str, revision: str = "") -> Path | None:
    """Return the snapshot directory of a cached model; None if it is not there or has no config.json.

    A branch or tag stands for the commit that it pointed to when the hub library last looked it up; "" is the main branch.
    """
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
    """Return the commit of a snapshot directory; "" for any other directory."""
    return snapshot.name if snapshot.parent.name == "snapshots" and COMMIT.fullmatch(snapshot.name) else ""
