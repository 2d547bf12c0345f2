"""One worker: a process group of its own, a wire of its own, and a log of everything the engine prints."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parity_audit.core.errors import BackendFailed, WorkerDied
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.types import Description, ReadBack, WeightPrint
from parity_audit.core.wire import (
    WIRE_FD_ENV,
    ApplyRequest,
    LoadRequest,
    RunReply,
    RunRequest,
    WeightsRequest,
)
from parity_audit.workers.bundle import bundle

OnProgress = Callable[..., None]
LOG_TAIL_LINES = 20
START_TIMEOUT = 300.0
OP_TIMEOUT = 3600.0
HINTS = {
    "out-of-memory": "use a smaller --dtype, fewer probes (--probe short), or a machine with more memory",
    "disk-full": "free some space, or point PARITY_AUDIT_CACHE and --out at another disk",
    "backend-failed": "the log has the whole traceback",
}
_ALIVE: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """A running backend process. Use `start`, ask with the typed methods, always `kill` in the end."""

    def __init__(self, process: subprocess.Popen[bytes], read_fd: int, write_fd: int, label: str, log: Path) -> None:
        self.process = process
        self.label = label
        self.log = log
        self._read_fd, self._write_fd = read_fd, write_fd
        self._pending = b""
        self._next_id = 0
        _ALIVE.add(self)

    @staticmethod
    def start(backend_key: str, python: str, env_vars: dict[str, str], log: Path, scratch: Path) -> Worker:
        """Spawn a worker and wait for its greeting.

        Raises:
            WorkerDied: the process ended before it could speak; the message has the log's last lines.
        """
        to_worker, ours = os.pipe()
        theirs, from_worker = os.pipe()
        environ = {**os.environ, **env_vars, WIRE_FD_ENV: f"{to_worker},{from_worker}"}
        environ.pop("PYTHONPATH", None)
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait starve their neighbours
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [python, "-I", str(bundle(scratch)), backend_key], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                env=environ, pass_fds=(to_worker, from_worker), start_new_session=True,
            )  # fmt: skip
        os.close(to_worker)
        os.close(from_worker)
        worker = Worker(process, theirs, ours, backend_key, log)
        worker._read(START_TIMEOUT, "start")
        return worker

    def prepare(self, request: LoadRequest) -> None:
        """Let it import its engine meanwhile; returns at once. What goes wrong, `load` will say."""
        with contextlib.suppress(OSError):
            self._ask("prepare", request)

    def load(self, request: LoadRequest, on_progress: OnProgress | None = None) -> None:
        """Load a model."""
        self.call("load", request, on_progress=on_progress)

    def describe(self) -> Description:
        """Versions and effective settings of the loaded model."""
        return from_plain(Description, self.call("describe", {}))

    def weights(self, request: WeightsRequest) -> list[WeightPrint]:
        """Fingerprints of live tensors."""
        return [from_plain(WeightPrint, item) for item in self.call("weights", request)]

    def run(self, request: RunRequest, on_progress: OnProgress | None = None) -> RunReply:
        """Run one probe."""
        return from_plain(RunReply, self.call("run", request, on_progress=on_progress))

    def replay(self, request: RunRequest, on_progress: OnProgress | None = None) -> RunReply:
        """Run one probe with sites replaced."""
        return from_plain(RunReply, self.call("replay", request, on_progress=on_progress))

    def apply(self, request: ApplyRequest) -> list[ReadBack]:
        """Bring the live model to exactly these edits."""
        return [from_plain(ReadBack, item) for item in self.call("apply", request)]

    def call(self, op: str, args: Any, *, timeout: float = OP_TIMEOUT, on_progress: OnProgress | None = None) -> Any:
        """Ask and wait.

        Raises:
            WorkerDied: no process, no answer in time, or an answer that is not the protocol's.
            BackendFailed: the backend raised.
        """
        try:
            self._ask(op, args)
        except OSError:
            raise self._died(op) from None
        while True:
            message = self._read(timeout, op)
            if message.get("id") != self._next_id:
                continue  # an answer that nobody waited for
            if "progress" in message:
                if on_progress is not None:
                    on_progress(**message["progress"])
            elif "error" in message:
                raise self._failed(op, message["error"])
            else:
                return message.get("result")

    def kill(self) -> None:
        """End the whole process group, now. Safe to call twice."""
        if self._read_fd < 0:
            return
        os.close(self._write_fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._read_fd)
        self._read_fd = self._write_fd = -1

    def _ask(self, op: str, args: Any) -> None:
        self._next_id += 1
        _write_all(self._write_fd, dumps({"id": self._next_id, "op": op, "args": args}).encode() + b"\n")

    def _read(self, timeout: float, op: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._pending:
            if not _readable(self._read_fd, deadline - time.monotonic()):
                self.kill()
                raise WorkerDied(f"{self.label} did not answer `{op}` in {timeout:.0f} s", where=str(self.log))
            data = os.read(self._read_fd, 1 << 16)
            if not data:
                raise self._died(op)
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            message: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError as error:
            raise WorkerDied(
                f"{self.label} answered `{op}` with something that is not JSON", where=str(self.log)
            ) from error
        return message

    def _died(self, op: str) -> WorkerDied:
        self.kill()
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "likely out of memory, or somebody killed it; captures already taken are kept" if code == -9 else ""
        return WorkerDied(
            f"the {self.label} process {how} during `{op}`", where=str(self.log), found=self._log_tail(), hint=hint
        )

    def _failed(self, op: str, error: dict[str, Any]) -> BackendFailed:
        code = error.get("code", "backend-failed")
        return BackendFailed(
            f"{self.label} failed during `{op}`: {error['message']}",
            code=code,
            where=str(self.log),
            hint=HINTS.get(code, ""),
        )

    def _log_tail(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "\n" + "\n".join(f"    {line}" for line in lines) if lines else ""


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _readable(fd: int, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, seconds)))


@atexit.register
def kill_all() -> None:
    """No orphan, whatever way the parent ends."""
    for worker in list(_ALIVE):
        worker.kill()
