"""Fork workers from a server process that has already imported their engine, for the engines with which that is possible."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from parity_audit.core.backend_ref import PORT
from parity_audit.core.wire import BATCH_INVARIANT, FORK_SERVER, FORK_SERVER_FD_ENV
from parity_audit.workers.processes import started
from parity_audit.workers.reap import MARK_ENV, end_family
from parity_audit.workers.temporary import INDUCTOR

_TORCH = ("parity_audit.backends.python_port", "parity_audit.backends.spec")
_DYNAMO = "torch._dynamo"
"""The module that einops imports when it is first used."""
_TRANSFORMERS = ("parity_audit.backends.hf", "transformers.modeling_utils")
_TRANSFORMER_LENS = ("parity_audit.backends.hooked_transformer", "transformer_lens", _DYNAMO)
IMPORTS = {
    "hf": _TRANSFORMERS,
    "vllm": ("parity_audit.backends.vllm", "parity_audit.backends.vllm_imported"),
    "sglang": ("parity_audit.backends.sglang", "parity_audit.backends.sglang_imported"),
    "nnsight": ("parity_audit.backends.nnsight", "nnsight.modeling.transformers", "transformers.modeling_utils"),
    "hooked_transformer": _TRANSFORMER_LENS,
    "transformer_bridge": _TRANSFORMER_LENS,
    "spec": (*_TORCH, _DYNAMO),
    PORT: _TORCH,
}
"""Backends whose workers may be forked -> the modules that the fork server imports; these do not open a GPU or start an
engine. The imports of a port's own file are not made in advance, because the file may set environment variables before
them, unless the file has a line of `PORT_SAYS`."""
READ_AT_IMPORT = {"vllm": frozenset({"tf32", BATCH_INVARIANT, "tensor_parallel_size", "pipeline_parallel_size"})}
"""Settings that an engine reads from environment variables when it is imported; a worker with one of these is not forked."""
PORT_SAYS = {
    f"# parity-audit: {library} may be imported before this file\n": imports
    for library, imports in {"transformers": _TRANSFORMERS, "transformer_lens": _TRANSFORMER_LENS}.items()
}
"""A line in the file of a port -> the modules that may be imported before that file is."""
IDLE_SERVERS = 2
"""The number of servers that are kept although they have no worker, because one audit, or the next, alternates between
a reference, a candidate's engine and ports. More are not kept, because each needs 300 to 700 MB."""
ENDING = 1.0
"""The seconds within which a process that has closed its sockets is expected to end."""
OWN_PREFIXES = ("PARITY_AUDIT_", "PYTEST_", INDUCTOR)
"""Prefixes of environment variables that may differ between the workers of one server, because no engine reads them at
import. torch sets the last one in this process when it first compiles something, but a server defines by itself where
compiled kernels are."""


class Forked:
    """A forked worker, with the methods of `subprocess.Popen` that `Channel` needs.

    It is a child of the fork server, not of this process.
    """

    def __init__(self, status: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.returncode: int | None = None
        self._pid: int | None = None
        self._status, self._pending, self._server = status, b"", server
        status.setblocking(False)

    @property
    def pid(self) -> int | None:
        """The process id; None before the process exists, because the server may still be importing."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """Return the exit status; None while the process lives.

        If the server has ended without reporting a status, return the server's. This happens if an engine ends the
        process that imports it, for example because it is built for other processors.
        """
        while self.returncode is None:
            try:
                data = self._status.recv(1 << 10)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._pending += data
            self._read_lines(over=not data)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the process still lives after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            select.select([self._status], [], [], left)
        return code

    def _read_lines(self, *, over: bool) -> None:
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            if self._pid is None:
                self._pid = int(line)
            else:
                self.returncode = int(line)
        if over and self.returncode is None:
            self.returncode = self._of_the_server()
        if self.returncode is not None:
            self._status.close()  # from now on the process id may be given to another process

    def _of_the_server(self) -> int:
        """Return the server's exit status; -SIGKILL if it is 0, or if the server lives but could not make another process."""
        try:
            return self._server.wait(ENDING) or -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL


class ForkServer:
    """A process that has imported an engine and forks workers on request."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start the server process, which imports its modules while this process continues.

        Raises:
            NotJudged: there is no space for its temporary files.
            OSError: there is no such interpreter.
        """
        self.mark = uuid.uuid4().hex
        self._workers: weakref.WeakSet[Forked] = weakref.WeakSet()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {**environ, FORK_SERVER_FD_ENV: str(theirs.fileno()), MARK_ENV: self.mark}
        with theirs:
            self._process, self._temporary = started(command, own, log, (theirs.fileno(),))

    def fork(self, key: str, environ: Mapping[str, str], cwd: Path | None, log: Path, wire: tuple[int, int]) -> Forked:
        """Request a new worker and return it.

        It uses the server's directory for temporary files, because an imported module may have stored that path.

        Args:
            key: the backend that the worker runs.
            wire: the worker's two ends of the pipes.

        Raises:
            ConnectionError: the server has ended.
        """
        ours, theirs = socket.socketpair()
        request = {"key": key, "environ": {**environ, **self._temporary.variables}, "cwd": str(cwd or Path.cwd())}
        with theirs, log.open("ab") as sink:
            socket.send_fds(self._control, [b"f"], [*wire, sink.fileno(), theirs.fileno()])
            ours.sendall(json.dumps(request).encode() + b"\n")
        worker = Forked(ours, self._process)
        self._workers.add(worker)
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether the server process is still running."""
        return self._process.poll() is None

    @property
    def is_idle(self) -> bool:
        """Whether none of the server's workers is running."""
        return all(worker.poll() is not None for worker in self._workers)

    def end(self) -> None:
        """End the server and every process that came from it."""
        self._control.close()
        end_family(self._process, self.mark)
        self._temporary.drop()


_Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]
"""The command line and the environment variables of a server."""
_SERVERS: dict[_Key, ForkServer] = {}


def imported_before(key: str, target: str | None = None, settings: Collection[str] = ()) -> tuple[str, ...]:
    """Return the modules that a fork server may import for this backend; empty if its worker cannot be forked.

    Args:
        key: the backend.
        target: `FILE:FUNCTION` of a port; a line of `PORT_SAYS` in the file allows further imports.
        settings: the names of the settings that the worker will be given.
    """
    if sys.platform != "linux" or not READ_AT_IMPORT.get(key, frozenset()).isdisjoint(settings):
        return ()
    if key == PORT and target is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # the worker reports what is wrong with the file
            text = Path(target.rpartition(":")[0]).read_text()
            return next((imports for line, imports in PORT_SAYS.items() if line in text), IMPORTS[key])
    return IMPORTS.get(key, ())


def forked(
    program: Sequence[str], key: str, imports: Sequence[str], environ: Mapping[str, str], log: Path, wire: tuple[int, int],
    *, cwd: Path | None,
) -> Forked:  # fmt: skip
    """Return a worker of backend `key` with `imports` already imported, forked from a server with the same program and variables.

    The server is started if there is none. Servers that are not needed any more are ended first.

    Raises:
        NotJudged: there is no space for temporary files.
        OSError: there is no such interpreter.
    """
    lasting = {name: value for name, value in environ.items() if not name.startswith(OWN_PREFIXES)}
    wanted = ((*program, FORK_SERVER, *imports), frozenset(lasting.items()))
    _end_those_not_needed(wanted)
    try:
        return _server(wanted, log).fork(key, environ, cwd, log, wire)
    except ConnectionError:  # the server is ending: its socket is closed, but its process did not appear as ended yet
        _SERVERS.pop(wanted).end()
        return _server(wanted, log).fork(key, environ, cwd, log, wire)


def _server(wanted: _Key, log: Path) -> ForkServer:
    """Return the server for this command line and these variables; start it if there is none.

    It becomes the last entry of `_SERVERS`, whose order is that of use.
    """
    server = _SERVERS.pop(wanted, None)
    if server is None:
        command, variables = wanted
        server = ForkServer(command, dict(variables), log)
    _SERVERS[wanted] = server
    return server


def _end_those_not_needed(wanted: _Key) -> None:
    """End servers to free the memory of their imports: those that have died, and all but the last `IDLE_SERVERS` idle ones.

    The idle servers that have not been used for the longest time are ended.
    """
    idle = [key for key, server in _SERVERS.items() if key != wanted and server.is_idle]
    surplus = idle[: max(len(idle) - IDLE_SERVERS, 0)]
    for key, server in list(_SERVERS.items()):
        if key in surplus or not server.is_alive:
            server.end()
            del _SERVERS[key]


def end_servers() -> None:
    """End every server and all its workers."""
    while _SERVERS:
        with contextlib.suppress(OSError):
            _SERVERS.popitem()[1].end()
