"""List the content of the cache directory with its sizes, and delete parts of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parity_audit.cache.aside import aside_root
from parity_audit.cache.locks import Lock, hold_if_free, locked
from parity_audit.cache.root import cache_root
from parity_audit.capture.workspace import ALIVE, CAPTURES, WORKING, reclaim
from parity_audit.core.errors import UsageError, refusals_of_the_disk
from parity_audit.core.manifest import MANIFEST_NAME
from parity_audit.envs.build import envs_root, is_ready, use_lock
from parity_audit.specs import installed, remembered

LEFTOVERS, SET_ASIDE = "leftovers", "set-aside"
PARSED_FILES = "readings"
"""The kind of the stored results of reading YAML files and configuration classes."""
KINDS = ("environments", "synthetic", "captures", "workers", PARSED_FILES, WORKING, SET_ASIDE, LEFTOVERS)
ALWAYS_PRUNED = (SET_ASIDE, LEFTOVERS)
"""The kinds that `prune` always deletes, because nothing of them is ever read again."""
SECONDS_PER_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class CacheItem:
    """One file or folder in the cache: its kind, name, path, bytes on disk, age in days, and whether a process uses it now."""

    kind: str
    name: str
    path: Path
    bytes: int
    days: float
    in_use: bool = False


def stored() -> list[CacheItem]:
    """Return every file and folder in the cache that has a kind, one cache directory after another."""
    return [_stored(kind, path) for kind, path in _paths()]


def prune(kinds: Sequence[str] = (), *, everything: bool = False, dry_run: bool = False) -> list[CacheItem]:
    """Delete everything of the kinds in `ALWAYS_PRUNED` and in `kinds` that no process uses; return what was deleted.

    With `dry_run` nothing is deleted, and the result is what would be. Finished captures of killed audits are first moved
    to the captures, so that they can be used again.

    Raises:
        UsageError: a name in `kinds` is not a kind.
        NotJudged: the cache cannot be written.
    """
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        raise UsageError(f"`{unknown}` is not a kind", code="unknown-kind", expected=", ".join(KINDS))
    wanted = KINDS if everything else (*ALWAYS_PRUNED, *kinds)
    chosen = [item for item in stored() if item.kind in wanted and not item.in_use]
    if dry_run:
        return chosen
    refusals = refusals_of_the_disk("write to the cache", cache_root(), "is it mounted read-only?")
    with refusals, locked(cache_root() / f"{WORKING}.lock"):
        reclaim(cache_root())
        return [item for item in chosen if _deleted(item)]


def _paths() -> Iterator[tuple[str, Path]]:
    """Yield the kind and path of everything; unfinished files and folders that no running audit uses are leftovers."""
    root = cache_root()
    for folder in sorted(envs_root().glob("*/")):
        yield ("environments" if is_ready(folder) else LEFTOVERS), folder
    for folder in sorted((root / "synthetic").glob("*/")):
        yield (LEFTOVERS if folder.name.startswith(".making-") else "synthetic"), folder
    for path in sorted((root / "workers").glob("worker-*.pyz")):
        yield "workers", path
    for path in sorted((root / "workers").glob("*.part")):
        yield LEFTOVERS, path
    for path in sorted(
        path for readings in (remembered.FOLDER, installed.FOLDER) for path in (root / readings).glob("*")
    ):
        yield (LEFTOVERS if path.suffix == ".part" else PARSED_FILES), path
    for folder in sorted((root / CAPTURES).glob("*/")):
        yield (CAPTURES if (folder / MANIFEST_NAME).is_file() else LEFTOVERS), folder
    for folder in sorted(aside_root().glob("*/")):
        yield SET_ASIDE, folder
    for folder in sorted((root / WORKING).glob("*/")):
        yield (WORKING if _held(folder / ALIVE) else LEFTOVERS), folder


def _stored(kind: str, path: Path) -> CacheItem:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir() or file.is_symlink()]
    size = sum(file.lstat().st_blocks * 512 for file in files if file.exists() or file.is_symlink())
    days = (time.time() - path.stat().st_mtime) / SECONDS_PER_DAY
    busy = any(_held(lock) for lock in _locks(kind, path))
    return CacheItem(kind=kind, name=path.name, path=path, bytes=size, days=days, in_use=busy)


def _locks(kind: str, path: Path) -> list[Path]:
    """Return the locks that a process holds while it uses, makes or writes this file or folder."""
    if kind == WORKING or (kind == LEFTOVERS and path.parent.name == WORKING):
        return [path / ALIVE]
    if kind == "workers":
        return sorted((cache_root() / WORKING).glob(f"*/{ALIVE}"))
    if kind == "environments" or path.parent == envs_root():
        return [use_lock(path), *sorted(envs_root().glob(f"{path.name.rpartition('-')[0]}-*.lock"))]
    if path.parent.name == "synthetic":
        name = path.name.removeprefix(".making-")
        return [path.parent / f"{name}.lock", path.parent / f"{name}.use"]
    return []


def _held(lock: Path) -> bool:
    """Return whether a process holds this lock; a lock file that does not exist is not held."""
    if not lock.exists():
        return False
    found = hold_if_free(lock)
    if found is not None:
        found.release()
    return found is None


def _deleted(item: CacheItem) -> bool:
    """Delete one file or folder and return whether it is gone; False also if a process has begun to use it.

    Its locks are held meanwhile, so that no process can begin to use it.
    """
    with _all_held(_locks(item.kind, item.path)) as mine:
        if not mine:
            return False
        if item.path.is_dir():
            shutil.rmtree(item.path, ignore_errors=True)
        else:
            item.path.unlink(missing_ok=True)
    return not item.path.exists()


@contextmanager
def _all_held(paths: Sequence[Path]) -> Iterator[bool]:
    """Try to take all of these locks and provide whether that succeeded; they are released at the end of the block."""
    release: list[Callable[[], None]] = []
    try:
        for path in paths:
            lock: Lock | None = hold_if_free(path) if path.parent.is_dir() else None
            if lock is None and path.parent.is_dir():
                yield False
                return
            if lock is not None:
                release.append(lock.release)
        yield True
    finally:
        for free in release:
            free()
