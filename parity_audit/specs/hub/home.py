"""A hub cache that holds one commit of one model and nothing else, made of links into the user's own cache.

Backends load a model by name. With the user's cache and a hub that answers, such a load fetches whatever the main branch is
by then; with this cache and the hub offline, every backend loads the commit that was judged.
"""

from __future__ import annotations

import os
from pathlib import Path

from parity_audit.cache.locks import locked
from parity_audit.core.errors import refusals_of_the_disk
from parity_audit.specs.hub.cached import MAIN


def pinned_home(repo_id: str, snapshot: Path, root: Path) -> Path:
    """The directory to give to a worker as HF_HOME; made once per snapshot directory below `root`.

    Raises:
        NotJudged: it cannot be written.
    """
    name = repo_id.replace("/", "--")
    home = root / f"{name}-{snapshot.name}"
    repository = home / "hub" / f"models--{name}"
    link = repository / "snapshots" / snapshot.name
    with refusals_of_the_disk(
        "write into the cache", root, "set PARITY_AUDIT_CACHE to a directory that can be written"
    ):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f"{home.name}.lock"):
            if not (link.is_symlink() and link.resolve() == snapshot.resolve()):
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                os.symlink(snapshot.resolve(), link, target_is_directory=True)
            ref = repository / "refs" / MAIN
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(snapshot.name)
    return home
