"""Synthetic checkpoints in the cache. Each is made once and sealed: the hash of every file is stored and checked before every use.

The check is needed because a program that reads a checkpoint may write to it by mistake. The seal is stored beside the
directory of the checkpoint, not inside it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from parity_audit.cache.aside import set_aside
from parity_audit.cache.contents import contents, difference
from parity_audit.cache.locks import locked
from parity_audit.core.errors import NotJudged


def sealed(home: Path, snapshot: Path, make: Callable[[Path], None]) -> None:
    """Make the checkpoint at `home`, unless it is there and its files match its seal.

    A checkpoint that does not match its seal is set aside, with a message, and made again. Unfinished files of a killed
    process are deleted. Two processes that need the same checkpoint wait for each other.

    Args:
        home: the directory of the checkpoint.
        snapshot: the snapshot directory inside `home`.
        make: writes the tree of `home` into the directory that it is given.

    Raises:
        NotJudged: the disk is full or read-only; no unfinished files are left.
    """
    try:
        _sealed(home, snapshot, make)
    except (OSError, SafetensorError) as error:
        raise NotJudged(
            f"cannot write the synthetic checkpoint: {error}", code="disk", where=str(home.parent),
            hint="make room (`parity-audit cache prune`), or set PARITY_AUDIT_CACHE",
        ) from error  # fmt: skip


def _sealed(home: Path, snapshot: Path, make: Callable[[Path], None]) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.parent / f"{home.name}.lock"):
        if home.exists():
            why = _damage(home, snapshot)
            if not why:
                return
            set_aside(home, what="miniature", why=why)
        staging = home.parent / f".making-{home.name}"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            make(staging)
            _seal_of(home).write_text(json.dumps(loaded_files(staging / snapshot.relative_to(home)), indent=1))
            os.replace(staging, home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def loaded_files(snapshot: Path) -> dict[str, str]:
    """Return the sha256 of every file that loading reads, by its path: the files of the snapshot, and the `refs` that name it."""
    refs = snapshot.parents[1] / "refs"
    return contents(snapshot) | {f"refs/{name}": digest for name, digest in contents(refs).items()}


def _damage(home: Path, snapshot: Path) -> str:
    """Return in words how a checkpoint differs from its seal; empty if it does not."""
    try:
        known = json.loads(_seal_of(home).read_text())
        return difference(loaded_files(snapshot), known)
    except (OSError, ValueError) as error:
        return f"its hashes cannot be read: {error}"


def _seal_of(home: Path) -> Path:
    return home.parent / f"{home.name}.sha256.json"
