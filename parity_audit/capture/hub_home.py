"""Hub caches that the forked workers of this process share: directories of links to the repositories of checkpoints.

A forked copy of a process that has imported an engine (`workers.forks`) keeps the HF_HOME of that import, because libraries read
HF_HOME when they are imported. With a separate HF_HOME per checkpoint, every audit of a process would have to import its engines
again; with these shared directories one import serves all audits.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from parity_audit.cache.locks import Lock
from parity_audit.cache.root import cache_root
from parity_audit.capture.workspace import working_folder


@dataclass(frozen=True)
class _Home:
    path: Path
    alive: Lock


PREFIX = "hub-"
_HOMES: dict[Path, list[_Home]] = {}
"""The hub caches of this process, by the root of the cache that contains them."""
_ONE_AT_A_TIME = threading.Lock()


def shared_home(hf_home: Path) -> Path:
    """Return a directory for HF_HOME that contains the repositories of `hf_home` under their names.

    It is the first directory of this process that has no other checkpoint under one of these names, or a new one. On a disk
    without symbolic links it is `hf_home` itself.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    repositories = sorted((hf_home / "hub").glob("models--*"))
    with _ONE_AT_A_TIME:
        homes = _HOMES.setdefault(cache_root(), [])
        path = next((home.path for home in homes if home.path.is_dir() and _is_free(home.path, repositories)), None)
        if path is None:
            homes.append(_Home(*working_folder(cache_root(), PREFIX)))
            path = homes[-1].path
        try:
            for repository in repositories:
                link = _link(path, repository)
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(repository.absolute(), target_is_directory=True)
        except OSError:
            return hf_home
    return path


def _is_free(home: Path, repositories: list[Path]) -> bool:
    """Whether no repository name is linked to another existing checkpoint; a link to a deleted checkpoint does not count."""
    links = ((_link(home, repository), repository) for repository in repositories)
    return not any(link.exists() and not link.samefile(repository) for link, repository in links)


def _link(home: Path, repository: Path) -> Path:
    return home / "hub" / repository.name


@atexit.register
def _drop() -> None:
    for home in (home for homes in _HOMES.values() for home in homes):
        with contextlib.suppress(OSError):
            shutil.rmtree(home.path)
        home.alive.release()
    _HOMES.clear()
