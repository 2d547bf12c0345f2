"""A worker's process, as its parent sees it, and the start of one of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from parity_audit.workers.temporary import OwnTemporary


class Process(Protocol):
    """What a wire needs of a worker's process: the part of `subprocess.Popen` that a forked worker has too."""

    @property
    def pid(self) -> int | None:
        """Its number, None before it exists."""

    @property
    def returncode(self) -> int | None:
        """What `poll` or `wait` found."""

    def poll(self) -> int | None:
        """Its exit status, None while it lives."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, when it has ended; raises `subprocess.TimeoutExpired`."""


def started(
    command: Sequence[str], environ: Mapping[str, str], log: Path, fds: Sequence[int], *, cwd: Path | None = None
) -> tuple[subprocess.Popen[bytes], OwnTemporary]:
    """A process in a session of its own that holds these file descriptors, and prints to the end of `log`; and its directory for
    temporary files, to drop when it has ended.

    Raises:
        NotJudged: there is no room for temporary files.
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
