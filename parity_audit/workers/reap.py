"""The end of a worker: its process group, and whatever it started in another one."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from parity_audit.workers.processes import Process

MARK_ENV = "PARITY_AUDIT_WORKER"
"""Environment variable with a worker's own mark; what the worker starts or forks inherits it."""
PROC = Path("/proc")


def end_family(process: Process, mark: str) -> None:
    """Kill a worker, its process group and every process that carries its mark, and wait for the worker itself.

    One that is still to be forked has no number yet: it ends by itself when it finds its wire closed.
    """
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)  # one that was forked just now may have no group of its own yet
        os.killpg(process.pid, signal.SIGKILL)
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def marked(mark: str) -> Iterator[int]:
    """Processes that were started with this mark in their environment; none where there is no /proc."""
    wanted = f"{MARK_ENV}={mark}".encode()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {item.value: item.name for item in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
