"""Make a hub cache that contains only one commit of one model, as links into the user's own cache.

Backends load a model by name. With the user's cache and the hub online, they would fetch the commit that the main branch points to
at that moment. With this cache and the hub offline, every backend loads the commit that is audited.
"""

from __future__ import annotations

import os
from pathlib import Path

from parity_audit.cache.locks import locked
from parity_audit.core.errors import refusals_of_the_disk
from parity_audit.specs.hub.cached import MAIN


def pinned_home(repo_id: str, snapshot: Path, root: Path) -> Path:
    """Return the directory that a worker gets as HF_HOME; there is one below `root` for each snapshot directory.

    Raises:
        NotJudged: the directory cannot be written.
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
