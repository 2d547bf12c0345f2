"""End a worker with its process group, and the processes that it started in other process groups."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from parity_audit.workers.processes import Process

MARK_ENV = "PARITY_AUDIT_WORKER"
"""The environment variable with the unique mark of a worker; processes that the worker starts or forks inherit it."""
PROC = Path("/proc")


def end_family(process: Process, mark: str) -> None:
    """Kill a worker, its process group and every process with its mark, and wait until the worker itself has ended.

    A worker that has not been forked yet has no process id; it ends by itself when it finds its pipes closed.
    """
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)  # a worker that was just forked may not have its own group yet
        os.killpg(process.pid, signal.SIGKILL)
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def marked(mark: str) -> Iterator[int]:
    """Yield the ids of processes that were started with this mark in their environment; none on a system without /proc."""
    wanted = f"{MARK_ENV}={mark}".encode()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def how_it_ended(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    known = {item.value: item.name for item in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
