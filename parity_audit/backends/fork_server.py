"""A process that has imported an engine and is copied by fork for every worker that the parent asks for.

The imports of transformers take longer than the audit of a small model does. A copy has them already and shares their memory. This
fits engines that start no threads and open no GPU while they are imported, on Linux, for models on the CPU.

A request is one datagram on the control socket with four file descriptors: the two ends of the wire, the log, and the new worker's
status socket, in which the parent has written one JSON line `{"key", "environ", "cwd"}`. The server answers on the status socket
with two lines: the process number, and, when the process has ended, its exit status as `subprocess.Popen.returncode` counts it.
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
"""How often the server looks whether its parent is still there: another copy of the parent may hold the control socket open."""
STDOUT, STDERR = 1, 2
PR_SET_CHILD_SUBREAPER = 36


def forked_worker(modules: Sequence[str]) -> str:
    """Import `modules`, then serve the control socket. Returns only in the copies, each with its own environment, directory, log and
    session, the backend key that it was asked for.

    A module that cannot be imported is left to the copies: their `load` says what is wrong with it.
    """
    control = socket.socket(fileno=int(os.environ.pop(FORK_SERVER_FD_ENV)))
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _adopt_orphans()
    with without_collection(), contextlib.suppress(Exception):
        for module in modules:
            importlib.import_module(module)
    sys.stdout.flush()  # or every copy prints it once more
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
    """As `os.fork`; None where there is no room for another process. The others go on."""
    try:
        return os.fork()
    except OSError:
        return None


class _Workers:
    """The copies that the parent has not let go of yet, by process number."""

    def __init__(self) -> None:
        self._statuses: dict[int, socket.socket] = {}
        self._told: set[int] = set()
        self._ended, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)

    def sockets(self) -> list[socket.socket]:
        """What can be read from when a child has ended or the parent lets go of a worker, and the end that the signal writes to."""
        return [self._ended, self._wake, *self._statuses.values()]

    def add(self, pid: int, status: socket.socket) -> None:
        """Remember a new one and tell the parent its number."""
        self._statuses[pid] = status
        _say(status, pid)

    def tell_ended(self) -> None:
        """Tell the parent how workers have ended. They are not reaped yet: their numbers are nobody else's while it uses them."""
        for pid in self._statuses.keys() - self._told:
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._told.add(pid)
                _say(self._statuses[pid], found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def let_go(self, ready: Sequence[socket.socket]) -> None:
        """End the workers whose status socket the parent has closed, and what the ended ones have left behind."""
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
    """Processes whose parent ends become children of this one from now on."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _children() -> list[int]:
    """The processes whose parent this one is; none where the kernel does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _request(control: socket.socket) -> tuple[tuple[int, int], int, socket.socket, dict[str, Any]]:
    """The wire, the log and the status socket of the next worker, and what it shall be. Without a parent this process ends."""
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
    """Make this copy what a process started for the purpose would be; the backend key that it shall serve."""
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
    with contextlib.suppress(OSError):  # the parent has let go of it
        status.sendall(f"{number}\n".encode())
