"""Synthetic checkpoints in the cache: made once, sealed with the hash of every file, verified before every use.

Whatever reads a checkpoint may also write to it, by mistake. The seal lies beside the checkpoint and not in it.
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
    """See that `home` holds what was made for it, else make it: `make(folder)` writes the same tree into another place.

    A checkpoint whose bytes are not those of its seal is set aside, with a message, and made again. What a killed process
    left of its own attempt is deleted. Two processes that want the same checkpoint wait for each other.

    Raises:
        NotJudged: the disk is full or read-only; nothing half-made is left.
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
    """The sha256 of everything that loading by name or path reads: the snapshot's files, and which snapshot it is."""
    refs = snapshot.parents[1] / "refs"
    return contents(snapshot) | {f"refs/{name}": digest for name, digest in contents(refs).items()}


def _damage(home: Path, snapshot: Path) -> str:
    """What is wrong with a checkpoint, in words; empty when it is as it was made."""
    try:
        known = json.loads(_seal_of(home).read_text())
        return difference(loaded_files(snapshot), known)
    except (OSError, ValueError) as error:
        return f"its hashes cannot be read: {error}"


def _seal_of(home: Path) -> Path:
    return home.parent / f"{home.name}.sha256.json"
