"""A separate directory for the temporary files of each worker.

Engines leave sockets, locks and folders there, because a worker is killed and cannot delete them itself.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from pathlib import Path

from parity_audit.cache.locks import hold, hold_if_free
from parity_audit.core.errors import ELSEWHERE, refusals_of_the_disk

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
PREFIX = "audit-"
"""How the directory's name begins. It is short, because engines open Unix sockets in it, whose path has at most 107 characters."""
IN_USE = ".in-use"
"""The file in a directory that is locked by the process that made it, for as long as that process lives."""


class OwnTemporary:
    """A new directory inside the temporary directory of this process; it exists until `drop`."""

    def __init__(self) -> None:
        """Delete the directories that killed processes have left, then make a new one.

        Raises:
            NotJudged: the disk is full or read-only.
        """
        self._base = Path(tempfile.gettempdir())
        _drop_abandoned(self._base)
        with refusals_of_the_disk("make a temporary directory", self._base, f"{ELSEWHERE}, or set TMPDIR"):
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = hold(self.folder / IN_USE)
        self._kernels = Path(os.environ.get(INDUCTOR) or self._base / f"torchinductor_{os.getuid()}").absolute()
        # torch keeps its compiled headers, which take one core ten seconds, in the temporary directory, whatever `INDUCTOR` is.
        with contextlib.suppress(OSError, KeyError):  # if the user has no name, each worker compiles its own headers
            self._kernels.mkdir(parents=True, exist_ok=True)
            (self.folder / f"torchinductor_{getpass.getuser()}").symlink_to(self._kernels, target_is_directory=True)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables for a process that uses this directory.

        Kernels that torch compiles are kept elsewhere, for the next worker.
        """
        return {"TMPDIR": str(self.folder), INDUCTOR: str(self._kernels)}

    def drop(self) -> None:
        """Delete the directory and its content."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


def _drop_abandoned(base: Path) -> None:
    """Delete the directories of processes that ended without deleting them; their locks are free."""
    for file in base.glob(f"{PREFIX}*/{IN_USE}"):
        try:
            lock = hold_if_free(file)
        except OSError:  # another user's
            continue
        if lock is not None:
            shutil.rmtree(file.parent, ignore_errors=True)
            lock.release()
