"""A directory for temporary files that is a worker's own: engines leave sockets, locks and folders there, and a worker is killed."""

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
"""Short: engines open Unix sockets in it, whose whole path has at most 107 characters."""
IN_USE = ".in-use"
"""The file that the process which made a directory has locked for as long as it lives."""


class OwnTemporary:
    """A new directory below the temporary directory of this process, until `drop`; those of killed processes are deleted first."""

    def __init__(self) -> None:
        """Make it.

        Raises:
            NotJudged: the disk is full or read-only.
        """
        self._base = Path(tempfile.gettempdir())
        _drop_abandoned(self._base)
        with refusals_of_the_disk("make a temporary directory", self._base, f"{ELSEWHERE}, or set TMPDIR"):
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = hold(self.folder / IN_USE)
        self._kernels = Path(os.environ.get(INDUCTOR) or self._base / f"torchinductor_{os.getuid()}").absolute()
        # Torch keeps the headers that it compiles, ten seconds of a core, below the temporary directory, whatever `INDUCTOR` says.
        with contextlib.suppress(OSError, KeyError):  # without a name for the user, each worker compiles its own
            self._kernels.mkdir(parents=True, exist_ok=True)
            (self.folder / f"torchinductor_{getpass.getuser()}").symlink_to(self._kernels, target_is_directory=True)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of a process that uses it; kernels that torch has compiled stay outside, for the next worker."""
        return {"TMPDIR": str(self.folder), INDUCTOR: str(self._kernels)}

    def drop(self) -> None:
        """Delete it with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


def _drop_abandoned(base: Path) -> None:
    """Delete the directories whose process has ended without doing so: nobody holds their locks any more."""
    for file in base.glob(f"{PREFIX}*/{IN_USE}"):
        try:
            lock = hold_if_free(file)
        except OSError:  # another user's
            continue
        if lock is not None:
            shutil.rmtree(file.parent, ignore_errors=True)
            lock.release()
