"""What the cache directory holds, how large it is, and what of it can go."""

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
READINGS = "readings"
"""What YAML files and configuration classes said when they were read last."""
KINDS = ("environments", "synthetic", "captures", "workers", READINGS, WORKING, SET_ASIDE, LEFTOVERS)
WITHOUT_LOSS = (SET_ASIDE, LEFTOVERS)
"""What `prune` always deletes: nothing of it is ever read again."""
SECONDS_PER_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One thing in the cache: its kind, name and place, its bytes on disk, its age, and whether somebody uses it now."""

    kind: str
    name: str
    path: Path
    bytes: int
    days: float
    in_use: bool = False


def stored() -> list[Stored]:
    """Everything in the cache, by kind."""
    return [_stored(kind, path) for kind, path in _paths()]


def prune(kinds: Sequence[str] = (), *, everything: bool = False, dry_run: bool = False) -> list[Stored]:
    """Delete what is never read again and things of these `kinds`, unless somebody uses them; returns what is gone.

    What killed audits had finished is kept as captures.

    Raises:
        UsageError: not a kind.
        NotJudged: the cache cannot be written.
    """
    unknown = next((kind for kind in kinds if kind not in KINDS), None)
    if unknown is not None:
        raise UsageError(f"`{unknown}` is not a kind", code="unknown-kind", expected=", ".join(KINDS))
    wanted = KINDS if everything else (*WITHOUT_LOSS, *kinds)
    chosen = [item for item in stored() if item.kind in wanted and not item.in_use]
    if dry_run:
        return chosen
    refusals = refusals_of_the_disk("write to the cache", cache_root(), "is it mounted read-only?")
    with refusals, locked(cache_root() / f"{WORKING}.lock"):
        reclaim(cache_root())
        return [item for item in chosen if _deleted(item)]


def _paths() -> Iterator[tuple[str, Path]]:
    """Kind and path of everything; what no finished thing and no running audit owns is a leftover."""
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
        yield (LEFTOVERS if path.suffix == ".part" else READINGS), path
    for folder in sorted((root / CAPTURES).glob("*/")):
        yield (CAPTURES if (folder / MANIFEST_NAME).is_file() else LEFTOVERS), folder
    for folder in sorted(aside_root().glob("*/")):
        yield SET_ASIDE, folder
    for folder in sorted((root / WORKING).glob("*/")):
        yield (WORKING if _held(folder / ALIVE) else LEFTOVERS), folder


def _stored(kind: str, path: Path) -> Stored:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if not file.is_dir() or file.is_symlink()]
    size = sum(file.lstat().st_blocks * 512 for file in files if file.exists() or file.is_symlink())
    days = (time.time() - path.stat().st_mtime) / SECONDS_PER_DAY
    busy = any(_held(lock) for lock in _locks(kind, path))
    return Stored(kind=kind, name=path.name, path=path, bytes=size, days=days, in_use=busy)


def _locks(kind: str, path: Path) -> list[Path]:
    """The locks that somebody holds who uses, makes or writes this thing."""
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
    """Whether somebody has this lock; a file that is not there locks nothing."""
    if not lock.exists():
        return False
    found = hold_if_free(lock)
    if found is not None:
        found.release()
    return found is None


def _deleted(item: Stored) -> bool:
    """Delete one thing with its locks held, so that nobody begins to use it meanwhile; False where somebody just did."""
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
    """Whether all of these locks could be had; they are let go at the end of the block."""
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
