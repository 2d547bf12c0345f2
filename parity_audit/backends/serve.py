"""The worker's main loop: read a request, answer it, survive the engine's exceptions, and end when the parent ends.

A worker is started as `python -I worker.pyz BACKEND_KEY`, with the wire's file descriptors in the environment. With
`python -I worker.pyz fork-server MODULE ...` the process imports the modules and is forked into one worker for each
request of the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import select
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity_audit.backends.base import CONFIG_TABLES, REGISTRY
from parity_audit.backends.fork_server import forked_worker
from parity_audit.backends.importing import without_collection
from parity_audit.backends.invariant_mode import InvariantMode
from parity_audit.backends.no_installs import refuse_installs
from parity_audit.core.errors import ParityError, is_out_of_memory, raised_at
from parity_audit.core.jsonio import dumps, from_plain, to_plain
from parity_audit.core.operations import OperationsRequest
from parity_audit.core.rollouts import SampleRequest, ScoreRequest
from parity_audit.core.types import Checkpoint, Description
from parity_audit.core.wire import (
    FORK_SERVER,
    PROTOCOL,
    WIRE_FD_ENV,
    ApplyRequest,
    ConfigsRequest,
    LoadRequest,
    RunRequest,
    WeightsRequest,
)

PR_SET_PDEATHSIG = 1
MOST_EXPENDABLE = "1000"
"""The highest value of Linux' `oom_score_adj`."""
STDERR = 2
MESSAGE_HEAD, MESSAGE_TAIL = 600, 200
"""Characters kept from the start and the end of an engine's message: enough for a sentence and a shape.

Messages have to be shortened, because some engines list every model that they know.
"""
ROLLOUT_OPS: dict[str, type[Any]] = {"sample": SampleRequest, "score": ScoreRequest}


def main() -> None:
    """Answer requests until the wire closes or a `shutdown` request comes."""
    key = forked_worker(sys.argv[2:]) if sys.argv[1] == FORK_SERVER else sys.argv[1]
    read_fd, write_fd = (int(fd) for fd in os.environ.pop(WIRE_FD_ENV).split(","))
    _die_with_parent(read_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _first_to_go()
    refuse_installs()
    os.register_at_fork(after_in_child=lambda: _close(read_fd, write_fd))
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    with os.fdopen(read_fd) as requests, os.fdopen(write_fd, "w") as replies:
        server = Server(key, replies)
        server.say({"hello": PROTOCOL, "python": sys.version.split()[0], "pid": os.getpid()})
        for line in requests:
            message = json.loads(line)
            if message["op"] == "shutdown":
                break
            server.answer(message)
    os._exit(0)


def _close(*fds: int) -> None:
    """Close the wire in a forked copy of this process, so that it neither reads requests nor keeps the wire open."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _first_to_go() -> None:
    """Make the kernel end this process first when memory runs out, not the parent, which can report it (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(MOST_EXPENDABLE)


def _die_with_parent(read_fd: int) -> None:
    """Ask the kernel to kill this process when the parent dies for any reason (Linux only).

    If the parent has died before this call, the wire is closed and this process ends at once. Otherwise it would import
    an engine and load a model that nobody uses.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    wire = select.poll()
    wire.register(read_fd, 0)
    if any(event & select.POLLHUP for _, event in wire.poll(0)):
        os._exit(0)


class Server:
    """Answers the requests on the wire with one backend."""

    def __init__(self, backend_key: str, replies: Any) -> None:
        self.backend_key = backend_key
        self.replies = replies
        self.backend: Any = None
        self.tokenized: Checkpoint | None = None
        self.mode = InvariantMode(backend_key)
        self.pid = os.getpid()

    def say(self, message: dict[str, Any]) -> None:
        """Write one line to the wire; a forked copy of this process, made by a port, ends instead of writing."""
        if os.getpid() != self.pid:
            os._exit(0)
        self.replies.write(dumps(message) + "\n")
        self.replies.flush()

    def answer(self, message: dict[str, Any]) -> None:
        """Carry out one request and send its result, or the exception that it raised."""
        number = message["id"]

        def tell(text: str, done: int | None = None, total: int | None = None) -> None:
            self.say({"id": number, "progress": {"text": text, "done": done, "total": total}})

        try:
            result = self.do(message["op"], message.get("args", {}), tell)
            self.say({"id": number, "result": to_plain(result)})
        except BaseException as error:  # a port's sys.exit() and KeyboardInterrupt are failures of that port
            trace = traceback.format_exc()
            with contextlib.suppress(OSError):  # a port may have closed stderr
                os.write(STDERR, trace.encode(errors="replace"))
            self.say({"id": number, "error": explained(error, trace)})

    def do(self, op: str, args: dict[str, Any], tell: Any) -> Any:
        """Return the result of one operation; `tell` reports progress.

        Raises:
            RuntimeError: the operation needs a loaded model, and none is loaded.
            ValueError: there is no such operation.
        """
        if op in ("prepare", "load"):
            request = self.mode.taken_from(from_plain(LoadRequest, args))
            self.tokenized = request.checkpoint if request.tokenize or request.chats else None
            with without_collection():
                self.backend = _backend_class(self.backend_key)()
                if op == "prepare":
                    return self.backend.prepare(request)
            return self.backend.load(request)
        if op == "configs":
            return self.configs(from_plain(ConfigsRequest, args))
        if self.backend is None:
            raise RuntimeError(f"`{op}` before `load`")
        if op == "describe":
            return self.mode.shown(self.described())
        if op == "weights":
            return list(self.backend.weights(from_plain(WeightsRequest, args)))
        if op == "apply":
            return self.backend.apply(from_plain(ApplyRequest, args))
        if op == "operations":
            return self.operations(from_plain(OperationsRequest, args), tell)
        if op in ROLLOUT_OPS:
            return self.rollouts(op, args, tell)
        if op in ("run", "replay"):
            return self.run(op, from_plain(RunRequest, args), tell)
        raise ValueError(f"unknown operation `{op}`")

    def described(self) -> Description:
        """Return the backend's description, with the tokenizer's error if token ids were asked for but not made.

        The error is only looked for if the backend uses transformers.
        """
        about: Description = self.backend.describe()
        if about.tokenization or self.tokenized is None or "transformers" not in about.versions:
            return about
        from parity_audit.backends.loading import tokenizer_error

        return replace(about, tokenizer_error=tokenizer_error(self.tokenized))

    def configs(self, request: ConfigsRequest) -> Any:
        """Return the configs that the engine itself has for released models; no model has to be loaded.

        Raises:
            NotImplementedError: the engine has none.
        """
        if self.backend_key not in CONFIG_TABLES:
            raise NotImplementedError(f"the backend `{self.backend_key}` has no configs of its own")
        return _class_at(CONFIG_TABLES[self.backend_key])().configs(request)

    def run(self, op: str, request: RunRequest, tell: Any) -> Any:
        """Run or replay a probe with the number of threads that the request asks for; the reply names the number used."""
        from parity_audit.backends.facts import threads  # imports torch, which an engine may want to do itself

        with threads(request.threads) as count:
            reply = getattr(self.backend, op)(request, tell)
        return replace(reply, facts={**reply.facts, "threads": count})

    def operations(self, request: OperationsRequest, tell: Any) -> Any:
        """Run single operations of the loaded model at several sizes, each on rows of its own input."""
        from parity_audit.backends.operations import operations

        return operations(self.backend, request, tell)

    def rollouts(self, op: str, args: dict[str, Any], tell: Any) -> Any:
        """Draw or score completions.

        Raises:
            NotImplementedError: the backend cannot do that.
        """
        ask = getattr(self.backend, op, None)
        if ask is None:
            raise NotImplementedError(f"the backend `{self.backend_key}` cannot {op} completions")
        return ask(from_plain(ROLLOUT_OPS[op], args), tell)


def _backend_class(key: str) -> Any:
    return _class_at(REGISTRY.get(key, key))


def _class_at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def explained(error: BaseException, trace: str) -> dict[str, Any]:
    """Return an exception as data: a code (which decides the hint), a message, and the end of the traceback."""
    if isinstance(error, ParityError):
        return {"code": error.code, "message": error.message, "traceback": trace[-8000:]}
    text = f"{type(error).__name__}: {_words(error)}"
    disk = isinstance(error, OSError) and error.errno == errno.ENOSPC
    code = "out-of-memory" if is_out_of_memory(error) else "disk-full" if disk else "backend-failed"
    return {"code": code, "message": _shortened(text), "traceback": trace[-8000:]}


def _shortened(text: str) -> str:
    """Return the beginning and the end of a long message; the log holds the whole message."""
    return text if len(text) <= MESSAGE_HEAD + MESSAGE_TAIL else f"{text[:MESSAGE_HEAD]} [...] {text[-MESSAGE_TAIL:]}"


def _words(error: BaseException) -> str:
    """Return the message of an exception, or the statement that raised it if there is none, as with a bare assertion."""
    try:
        words = str(error).strip()
    except Exception:
        return "(its message cannot be shown)"
    frames = traceback.extract_tb(error.__traceback__)
    return words or (f"{raised_at(error)}: {frames[-1].line}" if frames else "")


if __name__ == "__main__":
    main()
