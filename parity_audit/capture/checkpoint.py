"""Guard the checkpoint that an audit's backends read: a backend that changes it is named, and a synthetic one is restored.

Backends are foreign code and are given a path. A small synthetic checkpoint is copied for the audit, so that no other
audit is affected by a change; every checkpoint is checked again after each backend ran on it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parity_audit.cache.contents import difference, sha256_of
from parity_audit.cache.locks import Lock, hold
from parity_audit.core.errors import NotJudged
from parity_audit.core.types import Checkpoint
from parity_audit.specs.sealed import loaded_files

CHANGED = "checkpoint-changed"
SMALL_BYTES = 64 << 20
"""Up to this size files are copied or hashed whole, which takes well under a second; a miniature has 2 to 20 MiB."""

HEADER_BYTES = 1 << 20
"""Bytes hashed at the start of a large file: the names, shapes and offsets of all its tensors, and the first numbers."""


@dataclass
class GuardedCheckpoint:
    """The `checkpoint` that backends are given, and the `expected` hash (or size, time and header) of its files, by name.

    `restore` writes the files again; None for the user's own weights, which cannot be restored. `spoiled` then names the first
    backend that changed them. The lock `use` is held as long as this object lives, so that the cache keeps a checkpoint that
    was not copied.
    """

    checkpoint: Checkpoint
    expected: dict[str, str]
    restore: Callable[[], object] | None = None
    spoiled: str = ""
    use: Lock | None = None

    @contextmanager
    def watched(self, who: str) -> Iterator[None]:
        """Check the files after the `with` block in which backend `who` runs.

        Raises:
            NotJudged: `who` changed them, or an earlier backend did and they cannot be restored.
        """
        if self.spoiled:
            raise _changed(self.spoiled, "", restored=False)
        try:
            yield
        except Exception:
            self._look(who)
            raise
        self._look(who)

    def _look(self, who: str) -> None:
        found = _state(self.checkpoint)
        if self.checkpoint.by_name and self.restore is None:  # the hub library may fetch what was not there yet
            found = {name: token for name, token in found.items() if name in self.expected}
        what = difference(found, self.expected)
        if not what:
            return
        if self.restore is None:
            self.spoiled = who
        else:
            self.restore()
        raise _changed(who, what, restored=self.restore is not None)


def guarded(
    checkpoint: Checkpoint, *, remake: Callable[[], Checkpoint] | None, copies: Path | None
) -> GuardedCheckpoint:
    """Guard a checkpoint, or a copy of it below `copies` if it is synthetic and small.

    Args:
        remake: verifies a synthetic checkpoint and writes it again if necessary; None for the user's own weights.
    """
    if remake is None or checkpoint.hf_home is None:
        return GuardedCheckpoint(checkpoint, _state(checkpoint))
    home = Path(checkpoint.hf_home)
    if copies is None or _bytes(home) > SMALL_BYTES:
        use = hold(home.parent / f"{home.name}.use", shared=True)
        return GuardedCheckpoint(checkpoint, _state(checkpoint), remake, use=use)
    own = copies / home.name

    def copy() -> None:
        remake()
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(home, own, symlinks=True)

    copy()
    snapshot = own / Path(checkpoint.path).relative_to(home)
    given = dataclasses.replace(checkpoint, path=str(snapshot), hf_home=str(own))
    return GuardedCheckpoint(given, _state(given), copy)


def _state(checkpoint: Checkpoint) -> dict[str, str]:
    """Return a token of every file that loading reads: its hash, or for large files its size, time and header's hash.

    Large synthetic weights were hashed whole when they were requested; to do so again after each backend would take longer than
    the backend's run.
    """
    folder = Path(checkpoint.path)
    try:
        if checkpoint.synthetic is not None and _bytes(folder) <= SMALL_BYTES:
            return loaded_files(folder)
        return {path.name: _token(path) for path in folder.iterdir() if path.is_file()}
    except FileNotFoundError:
        return {}


def _token(path: Path) -> str:
    about = path.stat()
    if about.st_size <= SMALL_BYTES:
        return sha256_of(path)
    with path.open("rb") as stream:
        header = hashlib.sha256(stream.read(HEADER_BYTES))
    return f"{about.st_size}:{about.st_mtime_ns}:{header.hexdigest()}"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _changed(who: str, what: str, *, restored: bool) -> NotJudged:
    after = "it was restored for the others" if restored else "get the checkpoint again before you judge anything on it"
    return NotJudged(
        f"{who} changed the checkpoint that it was given{f': {what}' if what else ''}", code="checkpoint-changed",
        hint=f"a port reads `model_path` and writes elsewhere; {after}",
    )  # fmt: skip
