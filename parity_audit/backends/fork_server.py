"""A process that imports an engine once and forks a copy of itself for every worker that the parent process asks for.

Importing transformers takes longer than the audit of a small model. A forked copy has the imports already and shares their memory.
This works for engines that start no threads and open no GPU while they are imported, on Linux, for models on the CPU.

A request is one datagram on the control socket with four file descriptors: the two ends of the wire, the log, and the new worker's
status socket, in which the parent has written one JSON line `{"key", "environ", "cwd"}`. The server answers on the status socket
with two lines: the process id and, when the process has ended, its exit status in the form of `subprocess.Popen.returncode`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parity_audit.backends.importing import without_collection
from parity_audit.core.wire import FORK_SERVER_FD_ENV, WIRE_FD_ENV

LOOK_SECONDS = 1.0
"""How often the server checks that its parent still exists.

The end of the control socket does not show this, because another copy of the parent may hold the socket open."""
STDOUT, STDERR = 1, 2
PR_SET_CHILD_SUBREAPER = 36


def forked_worker(modules: Sequence[str]) -> str:
    """Import `modules`, then serve the control socket; return, in each forked copy only, the backend key it was asked for.

    Each copy has its own environment, working directory, log and session. If a module cannot be imported, the server ignores the
    error and skips the modules after it; the `load` of a copy then reports the error.
    """
    control = socket.socket(fileno=int(os.environ.pop(FORK_SERVER_FD_ENV)))
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _adopt_orphans()
    with without_collection(), contextlib.suppress(Exception):
        for module in modules:
            importlib.import_module(module)
    sys.stdout.flush()  # otherwise every copy would print the buffered text again
    workers = _Workers()
    while os.getppid() == parent:
        workers.tell_ended()
        ready, _, _ = select.select([control, *workers.sockets()], [], [], LOOK_SECONDS)
        workers.let_go(ready)
        if control in ready:
            wire, log, status, asked = _request(control)
            pid = _forked()
            if pid == 0:
                for held in (control, status, *workers.sockets()):
                    held.close()
                return _become_worker(wire, log, asked)
            for fd in (*wire, log):
                os.close(fd)
            if pid is None:
                status.close()
            else:
                workers.add(pid, status)
    os._exit(0)


def _forked() -> int | None:
    """Return the result of `os.fork`, or None if the system cannot make another process; the server then continues."""
    try:
        return os.fork()
    except OSError:
        return None


class _Workers:
    """The forked workers whose status socket the parent has not closed yet, by process id."""

    def __init__(self) -> None:
        self._statuses: dict[int, socket.socket] = {}
        self._told: set[int] = set()
        self._ended, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def sockets(self) -> list[socket.socket]:
        """Return the server's own sockets.

        The first becomes readable when a child has ended; the second is the end to which the signal handler writes. The status
        sockets become readable when the parent closes its end, that is, when it releases the worker.
        """
        return [self._ended, self._wake, *self._statuses.values()]

    def add(self, pid: int, status: socket.socket) -> None:
        """Register a new worker and send its process id to the parent."""
        self._statuses[pid] = status
        _say(status, pid)

    def tell_ended(self) -> None:
        """Send the parent the exit status of workers that have ended since the last call.

        The workers are not reaped yet, so that no other process gets their ids while the parent still uses them.
        """
        for pid in self._statuses.keys() - self._told:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._told.add(pid)
                _say(self._statuses[pid], found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def let_go(self, ready: Sequence[socket.socket]) -> None:
        """Kill the workers whose status socket the parent has closed, and processes that ended workers have left behind.

        Args:
            ready: the sockets that are readable now.
        """
        if self._ended in ready:
            self._ended.recv(1 << 12)
        gone = [pid for pid, status in self._statuses.items() if status in ready]
        for pid in gone:
            self._statuses.pop(pid).close()
            self._told.discard(pid)
        for pid in {*gone, *_children()} - self._statuses.keys() if gone else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, from now on."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    """Return the ids of this process's children; an empty list if the kernel does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _request(control: socket.socket) -> tuple[tuple[int, int], int, socket.socket, dict[str, Any]]:
    """Return the wire, log and status socket of the next worker, and the request for it.

    Ends this process if the parent has closed the control socket or has not written a request.
    """
    data, fds, _, _ = socket.recv_fds(control, 1, 4)
    if not data:
        os._exit(0)
    status = socket.socket(fileno=fds[3])
    with status.makefile() as lines:
        asked = lines.readline()
    if not asked:
        os._exit(0)
    return (fds[0], fds[1]), fds[2], status, json.loads(asked)


def _become_worker(wire: tuple[int, int], log: int, asked: Mapping[str, Any]) -> str:
    """Give this copy the session, log, environment and directory of a newly started worker; return its backend key."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for stream in (STDOUT, STDERR):
        os.dup2(log, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.environ[WIRE_FD_ENV] = ",".join(map(str, wire))
    os.chdir(asked["cwd"])
    return str(asked["key"])


def _say(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the parent has closed its end
        status.sendall(f"{number}\n".encode())
