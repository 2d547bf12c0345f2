"""Where an audit keeps its files: captures in the cache until the audit has succeeded, the report in the out directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from parity_audit.cache.locks import Lock, hold, hold_if_free, locked
from parity_audit.cache.root import cache_root
from parity_audit.capture.checkpoint import SMALL_BYTES
from parity_audit.capture.scratch import bytes_below
from parity_audit.capture.store import Capture
from parity_audit.core.errors import ELSEWHERE, refusals_of_the_disk
from parity_audit.core.manifest import MANIFEST_NAME
from parity_audit.core.types import Checkpoint

WORKING, CAPTURES, ALIVE = "working", "captures", "alive.lock"


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """`out` holds the report and the workers' logs, `captures` the tensors, `working` replays and patched runs.

    `captures` is this audit's alone, so that audits may run side by side. What an audit that did not finish left in
    `kept` is claimed when the next one begins, and what is left over goes back there. `alive` is locked for as long as this
    process uses `working`: what a killed one left is known by its lock being free.
    """

    out: Path
    cache: Path
    captures: Path
    working: Path
    kept: Path
    alive: Lock

    @staticmethod
    def open(out: Path | None, model: str, given: Path | None = None) -> Workspace:
        """Make the directories. Finished captures in `given` are copied, to take the place of runs with the same key.

        Raises:
            NotJudged: the disk is read-only or full.
        """
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S")
        out = out or Path("reports") / f"{slug(model)}-{stamp}"
        cache = cache_root()
        kept = cache / CAPTURES
        for folder in (out / "logs", kept):
            make_folder(folder)
        working, alive = working_folder(cache)
        captures = working / CAPTURES
        captures.mkdir()
        _move_finished(kept, captures)
        _copy_finished(given, captures)
        return Workspace(out=out.resolve(), cache=cache, captures=captures, working=working, kept=kept, alive=alive)

    def log(self, name: str) -> Path:
        """Log file of one worker."""
        return self.out / "logs" / f"{slug(name)}.log"

    def scratch(self, name: str) -> Path:
        """Directory for replays and patched runs of one candidate; empty at the start of an audit."""
        folder = self.working / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def home(self) -> Path:
        """A new empty directory for an engine to run in: a folder named like a model would be loaded in its place."""
        return Path(tempfile.mkdtemp(dir=self.working, prefix="home-"))

    def keeps_loaded(self, checkpoint: Checkpoint) -> bool:
        """Whether the reference stays in memory beside a candidate: only where it costs next to nothing."""
        size = sum(file.stat().st_size for file in Path(checkpoint.path).glob("*.safetensors"))
        return size <= SMALL_BYTES

    def drop_working(self) -> None:
        """Put captures where the next audit finds them, and delete replays and patched runs, good for this one only."""
        with contextlib.suppress(
            OSError
        ):  # whatever happened to these folders: the results of the audit are not in them
            _move_finished(self.captures, self.kept)
        shutil.rmtree(self.working, ignore_errors=True)
        self.alive.release()

    def abandon(self) -> None:
        """Leave things as they were before; a report folder that holds something stays."""
        self.drop_working()
        with contextlib.suppress(OSError):
            (self.out / "logs").rmdir()
            self.out.rmdir()

    def drop(self, captures: Sequence[Capture]) -> None:
        """Delete captures of an audit that judged everything; those of one that did not are kept for the next try."""
        for capture in captures:
            shutil.rmtree(self.kept / capture.folder.name, ignore_errors=True)


def kept_captures(cache: Path) -> tuple[int, int]:
    """How many finished captures wait for an audit that asks for them, and their bytes."""
    folders = [file.parent for file in (cache / CAPTURES).glob(f"*/{MANIFEST_NAME}")]
    return len(folders), sum(map(bytes_below, folders))


def working_folder(cache: Path, prefix: str = "audit-") -> tuple[Path, Lock]:
    """A new directory in the cache that is this process's own for as long as the lock is held; what killed ones left is deleted.

    Raises:
        NotJudged: the disk is read-only or full.
    """
    make_folder(cache / WORKING)
    with locked(cache / f"{WORKING}.lock"):
        reclaim(cache)
        folder = Path(tempfile.mkdtemp(dir=cache / WORKING, prefix=prefix))
        return folder, hold(folder / ALIVE)


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[Path]:
    """A directory in the cache that is deleted behind the block; what a killed process left of its own, the next one deletes.

    Raises:
        NotJudged: the disk is read-only or full.
    """
    folder, alive = working_folder(cache_root(), prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        alive.release()


def reclaim(cache: Path) -> list[Path]:
    """Delete what killed audits left, after keeping the captures that they had finished; returns their directories.

    Call it with the lock of the working directories, so that one that is being made does not look abandoned.
    """
    found = []
    for folder in sorted((cache / WORKING).glob("*/")):
        lock = hold_if_free(folder / ALIVE)
        if lock is not None:
            _move_finished(folder / CAPTURES, cache / CAPTURES)
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()
            found.append(folder)
    return found


def _move_finished(source: Path, target: Path) -> None:
    """Move every finished capture; one that another audit took first, or that is there already, is left."""
    for folder in source.glob("*/"):
        if (folder / MANIFEST_NAME).is_file():
            with contextlib.suppress(OSError):
                os.rename(folder, target / folder.name)


def _copy_finished(source: Path | None, target: Path) -> None:
    """Copy every finished capture that is not there yet."""
    for folder in () if source is None else source.glob("*/"):
        if (folder / MANIFEST_NAME).is_file() and not (target / folder.name).exists():
            shutil.copytree(folder, target / folder.name)


def make_folder(folder: Path) -> None:
    """Create a directory, or say what to do when the disk does not let us."""
    with refusals_of_the_disk(f"write to {folder}", folder, f"{ELSEWHERE}, or set PARITY_AUDIT_CACHE"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")


LONGEST_SLUG = 150
"""Of the 255 bytes that file systems allow; a time or an ending is put behind it."""


def slug(text: str) -> str:
    """A file name made of `text`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:LONGEST_SLUG] or "model"
