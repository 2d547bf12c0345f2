"""The wire and the ways a worker can end, with real processes and a tiny backend of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from interrupting import is_alive

from parity_audit.core.errors import BackendFailed, EnvFailed, WorkerDied
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import WIRE_FD_ENV, LoadRequest
from parity_audit.workers import channel, forks
from parity_audit.workers.bundle import bundle
from parity_audit.workers.client import Worker
from parity_audit.workers.reap import marked

BACKEND = textwrap.dedent(
    """
    import os, sys, tempfile, time
    from parity_audit.core.types import Description

    LINES = {
        "not json": b"\\xff\\xfe{", "a list": b"[]", "a number": b"3", "deep": b"[" * 100_000,
        "bad error": b'{"id": 1, "error": 3}', "bad progress": b'{"id": 1, "progress": {"txet": 1}}',
    }

    class Unprintable(Exception):
        def __str__(self):
            raise ValueError

    def wire():
        pipes = [fd for fd in range(3, 50) if os.path.exists(f"/proc/self/fd/{fd}")]
        return next(fd for fd in pipes if writable_pipe(fd))

    def writable_pipe(fd):
        flags = int(open(f"/proc/self/fdinfo/{fd}").read().split("flags:")[1].split()[0], 8)
        return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") and flags & 1

    class Tiny:
        def load(self, request):
            print("engines print on stdout", flush=True)
            mode = request.settings.get("mode")
            if mode == "raise":
                raise ValueError("no such layer")
            if mode == "memory":
                raise MemoryError("could not allocate")
            if mode == "exit":
                os._exit(7)
            if mode == "sleep":
                time.sleep(600)
            if mode == "sys.exit":
                sys.exit(0)
            if mode == "interrupt":
                raise KeyboardInterrupt
            if mode == "fork" and os.fork() == 0:  # holds every descriptor, and outlives its parent
                os.setsid()
                time.sleep(600)
            if mode == "fork":
                os._exit(3)
            if mode == "temporary":
                tempfile.mkdtemp(prefix="left-")
            if mode == "twice":
                os.fork()
            if mode in LINES:
                os.write(wire(), LINES[mode] + b"\\n")
                time.sleep(600)
            if mode == "assertion":
                assert not mode
            if mode == "unprintable":
                raise Unprintable

        def describe(self):
            return Description(backend="tiny", package=",".join(sorted(sys.modules))[:0], version="1")
    """
)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
REQUEST = {"checkpoint": Checkpoint(repo_id="x", path="/x"), "dtype": "float32", "device": "cpu"}


@pytest.fixture(params=[False, pytest.param(True, marks=LINUX)], ids=["own process", "forked"])
def worker(request, tmp_path, monkeypatch):
    site = Path(
        subprocess.check_output(
            [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    module = site / f"tiny_backend_{os.getpid()}.py"
    module.write_text(BACKEND)
    key = f"{module.stem}:Tiny"
    monkeypatch.setitem(forks.IMPORTS, key, (module.stem,))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    started = Worker.start(
        key, sys.executable, {}, tmp_path / "worker.log", tmp_path, imported=(module.stem,) if request.param else ()
    )
    yield started
    started.kill()
    forks.end_servers()
    module.unlink()


def load(worker, mode=None):
    worker.load(LoadRequest(**REQUEST, settings={"mode": mode}))


def test_a_request_is_answered_and_prints_go_to_the_log(worker):
    load(worker)

    assert worker.describe().version == "1"
    assert "engines print on stdout" in worker.log.read_text()


def test_an_exception_is_reported_and_the_worker_lives(worker):
    with pytest.raises(BackendFailed, match="no such layer"):
        load(worker, "raise")
    load(worker)

    assert "Traceback" in worker.log.read_text()


def test_out_of_memory_says_so(worker):
    with pytest.raises(BackendFailed) as caught:
        load(worker, "memory")
    assert caught.value.code == "out-of-memory"


def test_an_exit_is_a_death_with_its_code(worker):
    with pytest.raises(WorkerDied, match="exit code 7"):
        load(worker, "exit")


def test_kill_9_is_noticed_at_once(worker):
    threading.Timer(1.0, lambda: os.kill(worker.process.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        load(worker, "sleep")

    assert time.monotonic() - started < 30
    assert "memory" in caught.value.hint


@pytest.mark.parametrize(("mode", "says"), [("sys.exit", "SystemExit: 0"), ("interrupt", "KeyboardInterrupt"),
                                            ("unprintable", "Unprintable: "),
                                            ("assertion", r"AssertionError: tiny_backend_.*: assert not mode")])  # fmt: skip
def test_what_would_end_a_program_is_a_failure_of_the_port(worker, mode, says):
    with pytest.raises(BackendFailed, match=says):
        load(worker, mode)
    load(worker)


def test_temporary_files_of_an_engine_end_with_it(worker, tmp_path):
    load(worker, "temporary")
    assert len(list((tmp_path / "temporary").glob("audit-*/left-*"))) == 1

    worker.kill()
    forks.end_servers()

    assert list((tmp_path / "temporary").glob("audit-*")) == []


def test_a_death_is_noticed_although_a_forked_child_holds_the_pipe_and_the_child_ends_too(worker):
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="exit code 3"):
        load(worker, "fork")

    assert time.monotonic() - started < 10
    assert wait_until(lambda: not list(marked(worker.mark)), 5)


def test_a_forked_copy_of_a_port_takes_no_requests(worker):
    load(worker, "twice")
    assert [worker.describe().version for _ in range(5)] == ["1"] * 5


def test_no_answer_in_time_is_an_error_with_the_limit(tmp_path, worker):
    worker.timeout = 1.0
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="in 1 s") as caught:
        load(worker, "sleep")

    assert 0.9 < time.monotonic() - started < 10
    assert (caught.value.code, "--timeout" in caught.value.hint) == ("timeout", True)
    assert not is_alive(worker.process.pid)


def test_a_request_that_nobody_reads_does_not_hang(worker):
    worker.timeout = 1.5
    with pytest.raises(WorkerDied, match="did not answer"):
        load(worker, "sleep")
    with pytest.raises(WorkerDied):
        worker.call("load", {"much": "x" * (1 << 20)})


@pytest.mark.parametrize("mode", ["not json", "a list", "a number", "deep", "bad error", "bad progress"])
def test_garbage_on_the_wire_is_said_to_be_that(worker, mode):
    with pytest.raises(WorkerDied, match="broke the protocol during `load`") as caught:
        load(worker, mode)
    assert caught.value.code == "bad-answer"


@pytest.mark.parametrize("result", [None, 3, {"entries": 3}, {"entries": [{"probe": 1}]}, {"unknown": 1}])
def test_an_answer_of_another_shape_is_an_error(worker, result, monkeypatch):
    monkeypatch.setattr(worker, "call", lambda *_, **__: result)
    with pytest.raises(WorkerDied, match="no RunReply"):
        worker.run(None)


def test_prints_without_end_stop_before_the_disk_is_full(worker, monkeypatch):
    monkeypatch.setattr(channel, "LOG_BYTES", 10)
    with pytest.raises(WorkerDied, match="of prints"):
        load(worker, "sleep")


@pytest.mark.parametrize("python", ["/no/such/python", "/", "/etc/passwd"])
def test_an_interpreter_that_cannot_be_started_is_named(tmp_path, python):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvFailed, match="cannot start") as caught:
        Worker.start("hf", python, {}, tmp_path / "log", tmp_path)
    assert (caught.value.where, len(os.listdir("/proc/self/fd"))) == (python, before)


def test_a_program_that_is_no_python_says_how_it_ended(tmp_path):
    with pytest.raises(WorkerDied, match="ended with exit code 1 during `start`"):
        Worker.start("hf", "/bin/false", {}, tmp_path / "log", tmp_path)


def wait_until(true, seconds):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return true()


@pytest.mark.parametrize("imported", [(), pytest.param(("json",), marks=LINUX)])
def test_a_worker_dies_with_its_parent(tmp_path, imported):
    script = textwrap.dedent(
        f"""
        import os, sys
        from pathlib import Path
        from parity_audit.workers.client import Worker
        folder = Path({str(tmp_path)!r})
        worker = Worker.start("hf", sys.executable, {{}}, folder / "log", folder, imported={imported})
        while worker.process.pid is None:
            pass
        print(worker.process.pid, flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)

    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert not is_alive(pid)


def test_a_worker_whose_parent_is_gone_already_begins_nothing(tmp_path):
    read_fd, ours = os.pipe()
    theirs, write_fd = os.pipe()
    os.write(ours, b'{"id": 1, "op": "load", "args": {}}\n')
    os.close(ours)  # as the kernel does when the parent ends

    done = subprocess.run(
        [sys.executable, "-I", str(bundle(tmp_path)), "hf"], pass_fds=(read_fd, write_fd), timeout=60,
        env={**os.environ, WIRE_FD_ENV: f"{read_fd},{write_fd}"},
    )  # fmt: skip
    for fd in (read_fd, write_fd):
        os.close(fd)

    with os.fdopen(theirs, "rb") as said:
        assert (done.returncode, said.read()) == (0, b"")
