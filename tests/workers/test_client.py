"""The wire and the ways a worker can end, with real processes and a tiny backend of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from parity_audit.core.errors import BackendFailed, WorkerDied
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest
from parity_audit.workers.client import Worker

BACKEND = textwrap.dedent(
    """
    import os, sys, time
    from parity_audit.core.types import Description

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

        def describe(self):
            return Description(backend="tiny", package=",".join(sorted(sys.modules))[:0], version="1")
    """
)
REQUEST = {"checkpoint": Checkpoint(repo_id="x", path="/x"), "dtype": "float32", "device": "cpu"}


@pytest.fixture
def worker(tmp_path):
    site = Path(
        subprocess.check_output(
            [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    module = site / f"tiny_backend_{os.getpid()}.py"
    module.write_text(BACKEND)
    started = Worker.start(f"{module.stem}:Tiny", sys.executable, {}, tmp_path / "worker.log", tmp_path)
    yield started
    started.kill()
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
    threading.Timer(1.0, os.kill, (worker.process.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        load(worker, "sleep")

    assert time.monotonic() - started < 30
    assert "memory" in caught.value.hint


def test_a_worker_dies_with_its_parent(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, sys
        from pathlib import Path
        from parity_audit.workers.client import Worker
        worker = Worker.start("hf", sys.executable, {{}}, Path({str(tmp_path)!r}) / "log", Path({str(tmp_path)!r}))
        print(worker.process.pid, flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)

    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
