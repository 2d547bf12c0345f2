"""Workers that are copies of a process that has imported their engine, for the engines where that can be done."""

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
"""What einops imports when it is used first."""
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
"""Backends whose workers may be forked, and what they all import: modules that open no GPU and start no engine. A port's own
imports are left to it, since its file may set variables before them, unless it has a line of `PORT_SAYS`."""
READ_AT_IMPORT = {"vllm": frozenset({"tf32", BATCH_INVARIANT, "tensor_parallel_size", "pipeline_parallel_size"})}
"""Settings that an engine takes from variables, which it reads when it is imported."""
PORT_SAYS = {
    f"# parity-audit: {library} may be imported before this file\n": imports
    for library, imports in {"transformers": _TRANSFORMERS, "transformer_lens": _TRANSFORMER_LENS}.items()
}
"""Lines of a port's file, and what its worker has imported where one stands there."""
IDLE_SERVERS = 2
"""Servers without a worker that are kept: an audit, and the next one, goes back and forth between a reference, a candidate's engine
and ports. One holds 300 to 700 MB, so more are not."""
ENDING = 1.0
"""Seconds in which a process that has closed its sockets has ended."""
OWN_PREFIXES = ("PARITY_AUDIT_", "PYTEST_", INDUCTOR)
"""Variables that no engine reads while it is imported, and that change from one worker to the next: torch sets the last in this
process when something compiles for the first time, and a server says itself where compiled kernels are."""


class Forked:
    """A forked worker, with the part of `subprocess.Popen` that a wire needs. It is a child of the server, not of this process."""

    def __init__(self, status: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.returncode: int | None = None
        self._pid: int | None = None
        self._status, self._pending, self._server = status, b"", server
        status.setblocking(False)

    @property
    def pid(self) -> int | None:
        """Its number, None before it exists: the server may still be importing."""
        self.poll()
        return self._pid

    def poll(self) -> int | None:
        """Its exit status, None while it lives. Where the server is gone, so is the worker, and has the server's: an engine may end
        the process that imports it, as one built for other processors does."""
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
        """Its exit status, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it still lives after `timeout` seconds.
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
            self._status.close()  # its number may be given to another process from now on

    def _of_the_server(self) -> int:
        """The server's exit status; that of a kill where it lives, and had no room for another process."""
        try:
            return self._server.wait(ENDING) or -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL


class ForkServer:
    """A process that has imported an engine, and what this process tells it."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        """Start it; it imports while this process goes on.

        Raises:
            NotJudged: there is no room for its temporary files.
            OSError: there is no such interpreter.
        """
        self.mark = uuid.uuid4().hex
        self._workers: weakref.WeakSet[Forked] = weakref.WeakSet()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {**environ, FORK_SERVER_FD_ENV: str(theirs.fileno()), MARK_ENV: self.mark}
        with theirs:
            self._process, self._temporary = started(command, own, log, (theirs.fileno(),))

    def fork(self, key: str, environ: Mapping[str, str], cwd: Path | None, log: Path, wire: tuple[int, int]) -> Forked:
        """A new worker. Its temporary files are where the server's are: what was imported may hold that place.

        Raises:
            ConnectionError: the server is gone.
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
        """Whether it can still be asked."""
        return self._process.poll() is None

    @property
    def is_idle(self) -> bool:
        """Whether none of its workers lives."""
        return all(worker.poll() is not None for worker in self._workers)

    def end(self) -> None:
        """End it and every process that came from it."""
        self._control.close()
        end_family(self._process, self.mark)
        self._temporary.drop()


_Key = tuple[tuple[str, ...], frozenset[tuple[str, str]]]
"""The command line of a server, and its variables."""
_SERVERS: dict[_Key, ForkServer] = {}


def imported_before(key: str, target: str | None = None, settings: Collection[str] = ()) -> tuple[str, ...]:
    """What a worker of this backend may find imported, nothing where it may not be forked here; of a port `FILE:FUNCTION` what its
    file says.

    Args:
        settings: the names of the settings that the worker will be given.
    """
    if sys.platform != "linux" or not READ_AT_IMPORT.get(key, frozenset()).isdisjoint(settings):
        return ()
    if key == PORT and target is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # the worker says what is wrong with the file
            text = Path(target.rpartition(":")[0]).read_text()
            return next((imports for line, imports in PORT_SAYS.items() if line in text), IMPORTS[key])
    return IMPORTS.get(key, ())


def forked(
    program: Sequence[str], key: str, imports: Sequence[str], environ: Mapping[str, str], log: Path, wire: tuple[int, int],
    *, cwd: Path | None,
) -> Forked:  # fmt: skip
    """A worker of `key` that has `imports`, from a server with the same program and variables; one is started where there is none.

    Raises:
        NotJudged: there is no room for temporary files.
        OSError: there is no such interpreter.
    """
    lasting = {name: value for name, value in environ.items() if not name.startswith(OWN_PREFIXES)}
    wanted = ((*program, FORK_SERVER, *imports), frozenset(lasting.items()))
    _end_those_not_needed(wanted)
    try:
        return _server(wanted, log).fork(key, environ, cwd, log, wire)
    except ConnectionError:  # one that is ending has closed its socket before it can be seen to have ended
        _SERVERS.pop(wanted).end()
        return _server(wanted, log).fork(key, environ, cwd, log, wire)


def _server(wanted: _Key, log: Path) -> ForkServer:
    """The server of this kind, started where there is none; it is the last in `_SERVERS` from now on."""
    server = _SERVERS.pop(wanted, None)
    if server is None:
        command, variables = wanted
        server = ForkServer(command, dict(variables), log)
    _SERVERS[wanted] = server
    return server


def _end_those_not_needed(wanted: _Key) -> None:
    """A server holds what it imported in memory: those that have ended make room, and those that have not been used for longest."""
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
