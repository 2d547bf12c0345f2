"""The interface of a worker's process as its parent uses it, and a function to start a new process."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from parity_audit.workers.temporary import OwnTemporary


class Process(Protocol):
    """The part of `subprocess.Popen` that `Channel` needs, and that a forked worker also has."""

    @property
    def pid(self) -> int | None:
        """The process id; None before the process exists."""

    @property
    def returncode(self) -> int | None:
        """The exit status that `poll` or `wait` found; None before that."""

    def poll(self) -> int | None:
        """Return the exit status; None while the process lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended and return its exit status; raises `subprocess.TimeoutExpired`."""


def started(
    command: Sequence[str], environ: Mapping[str, str], log: Path, fds: Sequence[int], *, cwd: Path | None = None
) -> tuple[subprocess.Popen[bytes], OwnTemporary]:
    """Start a process in a new session; return it and its directory for temporary files, to be deleted when it has ended.

    Args:
        log: the file to which the output of the process is appended.
        fds: the file descriptors that the process inherits.

    Raises:
        NotJudged: there is no space for temporary files.
        OSError: there is no such program.
    """
    temporary = OwnTemporary()
    try:
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**environ, **temporary.variables}, cwd=cwd,
                pass_fds=fds, start_new_session=True,
            )  # fmt: skip
    except OSError:
        temporary.drop()
        raise
    return process, temporary
