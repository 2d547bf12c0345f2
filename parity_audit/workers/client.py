"""A worker process with its own process group, its own pair of pipes, and a log of everything that the engine prints."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parity_audit.core.errors import LESS_MEMORY, BackendFailed, CannotRun, EnvFailed, NotJudged, WorkerDied
from parity_audit.core.wire import (
    PROTOCOL,
    WIRE_FD_ENV,
    LoadRequest,
)
from parity_audit.workers.asking import BackendClient, OnProgress
from parity_audit.workers.bundle import bundle
from parity_audit.workers.channel import Channel, Ended, Garbled, TimedOut
from parity_audit.workers.forks import end_servers, forked
from parity_audit.workers.processes import Process, started
from parity_audit.workers.reap import MARK_ENV, end_family, how_it_ended
from parity_audit.workers.temporary import OwnTemporary

LOG_TAIL_LINES, LOG_TAIL_BYTES = 20, 1 << 16
TIMEOUT = 3600.0
"""The seconds that one request may take: a float64 run of a full-size model on a few cores takes most of an hour."""
START_TIMEOUT = 300.0
ENDING = 5.0
"""The seconds to wait, after the pipe was closed, for the process to end: its exit status tells why it ended."""
HINTS = {
    "out-of-memory": LESS_MEMORY,
    "disk-full": "free some space, or point PARITY_AUDIT_CACHE and --out at another disk",
    "backend-failed": "the log has the whole traceback",
    CannotRun.default_code: "another release, or another backend",
    "missing-tensors": "the loader would fill them with random numbers; give the complete checkpoint",
    "name-not-in-release": "a checkpoint of an architecture that the release has: `name=` of the backend says which, "
    "as in transformer_lens==2.18.0,name=meta-llama/Llama-3.2-1B",
    "bad-weights": "get the checkpoint again",
    "no-server": "start the server, wait until it is ready, and give its address: --engine-url http://HOST:PORT",
    "server-model": "serve the model that the question is about, under its name or from its directory",
    "server-answer": "nothing of it is used; look at the server's log, and at what stands between it and this machine",
    "server-refused": "the server's log says why; SGLang needs no further option, vLLM needs --max-logprobs of 1 or more",
    "server-start": "the log has SGLang's own words",
}
_ALIVE: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker(BackendClient):
    """A running backend process. Create it with `start`, send requests with the typed methods, and always `kill` it at the end."""

    def __init__(self, channel: Channel, label: str, mark: str, timeout: float, temporary: OwnTemporary | None) -> None:
        self.channel, self.process, self.log = channel, channel.process, channel.log
        self.label, self.mark, self.timeout, self._temporary = label, mark, timeout, temporary
        self._next_id = 0
        self._killed = False
        _ALIVE.add(self)

    @staticmethod
    def start(
        backend_key: str, python: str, env_vars: dict[str, str], log: Path, scratch: Path, timeout: float = TIMEOUT,
        *, cwd: Path | None = None, imported: Sequence[str] = (),
    ) -> Worker:  # fmt: skip
        """Start a worker and return it.

        With `imported`, the worker is forked from a process that has imported these modules, and this method returns
        before the worker exists. Otherwise the worker is a new process, and this method waits for its greeting.

        Args:
            timeout: the seconds that each request may take.
            cwd: the working directory of the worker; None for that of the parent.
            imported: the modules that the worker has imported when it starts; see `imported_before`.

        Raises:
            EnvFailed: there is no such interpreter.
            NotJudged: there is no space for temporary files.
            WorkerDied: the process ended before its greeting; the message has the last lines of the log.
        """
        to_worker, ours = os.pipe()
        theirs, from_worker = os.pipe()
        mark = uuid.uuid4().hex
        environ = {**os.environ, **env_vars, WIRE_FD_ENV: f"{to_worker},{from_worker}", MARK_ENV: mark}
        environ.pop("PYTHONPATH", None)
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait in a busy loop take CPU time from others
        environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # fewer page faults in scores of long texts
        log.parent.mkdir(parents=True, exist_ok=True)
        wire = (to_worker, from_worker)
        process: Process
        temporary: OwnTemporary | None = None
        try:
            program = [python, "-I", str(bundle(scratch))]
            if imported:
                process = forked(program, backend_key, imported, environ, log, wire, cwd=cwd)
            else:
                process, temporary = started([*program, backend_key], environ, log, wire, cwd=cwd)
        except (OSError, NotJudged) as error:
            os.close(theirs)
            os.close(ours)
            if isinstance(error, NotJudged):
                raise
            raise EnvFailed(f"cannot start `{python}`: {error.strerror or error}", where=python) from error
        finally:
            os.close(to_worker)
            os.close(from_worker)
        worker = Worker(Channel(process, theirs, ours, log), backend_key, mark, timeout, temporary)
        if imported:
            return worker
        greeting = worker._answer("start", min(START_TIMEOUT, timeout))
        if greeting.get("hello") != PROTOCOL:
            raise worker._bad("start", f"greeted with {greeting!r:.80}")
        return worker

    def prepare(self, request: LoadRequest) -> None:
        """Make the backend import its engine in the background, and return at once. An error is raised by `load` later."""
        with contextlib.suppress(TimedOut, Ended, Garbled):
            self._ask("prepare", request, time.monotonic() + self.timeout)

    def call(self, op: str, args: Any, *, on_progress: OnProgress | None = None) -> Any:
        """Send a request and return its answer as plain data, as in `Asking.call`.

        Raises:
            WorkerDied: the process has ended, did not answer in time, or sent an answer that breaks the protocol.
            BackendFailed: the backend raised an error.
        """
        deadline = time.monotonic() + self.timeout
        try:
            self._ask(op, args, deadline)
        except (TimedOut, Ended, Garbled) as error:
            raise self._ended(op, error, self.timeout) from None
        while True:
            message = self._answer(op, deadline - time.monotonic())
            if message.get("id") != self._next_id:
                continue  # the answer to an earlier request such as `prepare`, for which nothing waits
            if "progress" in message:
                self._tell(op, message["progress"], on_progress)
            elif "error" in message:
                raise self._failed(op, message["error"])
            else:
                return message.get("result")

    def _tell(self, op: str, news: Any, on_progress: OnProgress | None) -> None:
        if not isinstance(news, dict) or not news.keys() <= {"text", "done", "total"} or "text" not in news:
            raise self._bad(op, f"reported {news!r:.80}")
        if on_progress is not None:
            on_progress(**news)

    def kill(self) -> None:
        """Kill the process and everything that it started. Safe to call twice."""
        if not self._killed:
            end_family(self.process, self.mark)
            self.channel.close()
            if self._temporary is not None:
                self._temporary.drop()
            self._killed = True

    def _ask(self, op: str, args: Any, deadline: float) -> None:
        self._next_id += 1
        self.channel.send({"id": self._next_id, "op": op, "args": args}, deadline)

    def _answer(self, op: str, seconds: float) -> dict[str, Any]:
        """Return the next message. Any failure ends the worker, because it cannot be used any more."""
        try:
            return self.channel.receive(time.monotonic() + seconds)
        except (TimedOut, Ended, Garbled) as error:
            raise self._ended(op, error, self.timeout if op != "start" else seconds) from None

    def _ended(self, op: str, error: Exception, limit: float) -> WorkerDied:
        if isinstance(error, Garbled):
            return self._bad(op, f"said {error}")
        if isinstance(error, Ended):
            return self._died(op)
        self.kill()
        return WorkerDied(
            f"{self.label} did not answer `{op}` in {limit:.0f} s", code="timeout", where=str(self.log),
            found=self._log_tail(), hint="give it longer with --timeout, or see in its log what it waits for",
        )  # fmt: skip

    def _bad(self, op: str, what: str) -> WorkerDied:
        self.kill()
        return WorkerDied(
            f"{self.label} broke the protocol during `{op}`: {what}", code="bad-answer", where=str(self.log),
            hint="something in that process writes to a file descriptor that is not its own, or prints without end",
        )  # fmt: skip

    def _died(self, op: str) -> WorkerDied:
        try:
            code = self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return self._bad(op, "closed the wire")
        self.kill()
        hint = "likely out of memory, or somebody killed it; captures already taken are kept" if code == -9 else ""
        return WorkerDied(
            f"the {self.label} process {how_it_ended(code)} during `{op}`", where=str(self.log),
            found=self._log_tail(), hint=hint,
        )  # fmt: skip

    def _failed(self, op: str, error: Any) -> BackendFailed | WorkerDied:
        if not isinstance(error, dict) or not all(isinstance(error.get(key), str) for key in ("code", "message")):
            return self._bad(op, f"failed with {error!r:.80}")
        return backend_failed(self.label, op, error, self.log)

    def _log_tail(self) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "\n" + "\n".join(f"    {line[:500]}" for line in lines) if lines else ""


def backend_failed(label: str, op: str, error: Mapping[str, str], log: Path) -> BackendFailed:
    """Return the error that a backend raised, from the code and message that the worker sent, with a hint for this code."""
    code = error["code"]
    return BackendFailed(
        f"{label} failed during `{op}`: {error['message']}", code=code, where=str(log), hint=HINTS.get(code, "")
    )


@atexit.register
def kill_all() -> None:
    """Kill all workers and fork servers when the parent process exits, so that none keeps running without it."""
    for worker in list(_ALIVE):
        worker.kill()
    end_servers()
