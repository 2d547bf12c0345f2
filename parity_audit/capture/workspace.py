"""The directories of an audit: captures stay in the cache until the audit has succeeded, the report is in the out directory."""

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

    `captures` belongs to this audit alone, so that audits may run in parallel. Captures that an unfinished audit left in `kept`
    are moved here when the next audit begins; captures that remain at its end are moved back. `alive` is locked as long as this
    process uses `working`: a free lock shows that the process was killed.
    """

    out: Path
    cache: Path
    captures: Path
    working: Path
    kept: Path
    alive: Lock

    @staticmethod
    def open(out: Path | None, model: str, given: Path | None = None) -> Workspace:
        """Create the directories. Finished captures in `given` are copied, so that they replace runs with the same key.

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
        """Return the log file of one worker."""
        return self.out / "logs" / f"{slug(name)}.log"

    def scratch(self, name: str) -> Path:
        """Return the directory for one candidate's replays and patched runs; files of an earlier call are deleted."""
        folder = self.working / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def home(self) -> Path:
        """Make an empty directory in which an engine runs.

        In any other working directory a folder named like the model could be loaded instead of the model.
        """
        return Path(tempfile.mkdtemp(dir=self.working, prefix="home-"))

    def keeps_loaded(self, checkpoint: Checkpoint) -> bool:
        """Whether the reference may stay in memory beside a candidate: only if its weights are at most `SMALL_BYTES`."""
        size = sum(file.stat().st_size for file in Path(checkpoint.path).glob("*.safetensors"))
        return size <= SMALL_BYTES

    def drop_working(self) -> None:
        """Move captures to where the next audit finds them; delete replays and patched runs, which only this audit can use."""
        # Whatever happened to these folders: the results of the audit are not in them.
        with contextlib.suppress(OSError):
            _move_finished(self.captures, self.kept)
        shutil.rmtree(self.working, ignore_errors=True)
        self.alive.release()

    def abandon(self) -> None:
        """Remove the directories of this audit; a report folder that is not empty stays."""
        self.drop_working()
        with contextlib.suppress(OSError):
            (self.out / "logs").rmdir()
            self.out.rmdir()

    def drop(self, captures: Sequence[Capture]) -> None:
        """Delete these captures once they are no longer needed; an audit that did not judge everything keeps its own."""
        for capture in captures:
            shutil.rmtree(self.kept / capture.folder.name, ignore_errors=True)


def kept_captures(cache: Path) -> tuple[int, int]:
    """Return the number of finished captures that a later audit may reuse, and their bytes."""
    folders = [file.parent for file in (cache / CAPTURES).glob(f"*/{MANIFEST_NAME}")]
    return len(folders), sum(map(bytes_below, folders))


def working_folder(cache: Path, prefix: str = "audit-") -> tuple[Path, Lock]:
    """Make a directory in the cache that belongs to this process while the lock is held; those of killed processes are deleted.

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
    """Yield a directory in the cache that is deleted after the `with` block; if this process is killed, a later one deletes it.

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
    """Delete what killed audits left, except the captures that they had finished; return their directories.

    Call it while holding the lock of the working directories, so that a directory being made does not look abandoned.
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
    """Move every finished capture; skip one that another audit moved first or that the target already has."""
    for folder in source.glob("*/"):
        if (folder / MANIFEST_NAME).is_file():
            with contextlib.suppress(OSError):
                os.rename(folder, target / folder.name)


def _copy_finished(source: Path | None, target: Path) -> None:
    """Copy every finished capture that the target does not have yet."""
    for folder in () if source is None else source.glob("*/"):
        if (folder / MANIFEST_NAME).is_file() and not (target / folder.name).exists():
            shutil.copytree(folder, target / folder.name)


def make_folder(folder: Path) -> None:
    """Create a directory; if the disk refuses, raise an error that says what to do."""
    with refusals_of_the_disk(f"write to {folder}", folder, f"{ELSEWHERE}, or set PARITY_AUDIT_CACHE"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")


LONGEST_SLUG = 150
"""The longest name: file systems allow 255 bytes, and a time or a suffix is appended."""


def slug(text: str) -> str:
    """Return a file name made of `text`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:LONGEST_SLUG] or "model"
