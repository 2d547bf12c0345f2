"""Workers that are copies of a process that has imported their engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import pytest
from interrupting import is_alive

from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import BackendFailed, WorkerDied
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest
from parity_audit.selftest.ports import write_port
from parity_audit.workers import forks
from parity_audit.workers.client import Worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")

BACKEND = textwrap.dedent(
    """
    import os, time
    from parity_audit.core.types import Description

    IMPORTED_BY = os.getpid()
    time.sleep(float(os.environ.get("SECONDS_OF_IMPORT", 0)))
    assert "NO_IMPORT" not in os.environ, "no import today"
    if "ENDS_AT_IMPORT" in os.environ:
        os.kill(os.getpid(), int(os.environ["ENDS_AT_IMPORT"]))

    fork, forks = os.fork, iter(range(int(os.environ.get("FORKS", 99))))

    def counted():
        if next(forks, None) is None:
            raise BlockingIOError("no room for another process")
        return fork()

    os.fork = counted

    class Engine:
        def load(self, request):
            print("loaded", flush=True)

        def describe(self):
            found = {
                "imported_by": IMPORTED_BY, "pid": os.getpid(), "session": os.getsid(0), "cwd": os.getcwd(),
                "variable": os.environ.get("PARITY_AUDIT_SAID"), "wire": sorted(n for n in os.environ if "_FD" in n),
            }
            return Description(backend="engine", package="", version="1", settings=found)
    """
)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a worker whose environment has the given variables too; everything ends with the test."""
    module = Path(sysconfig.get_path("purelib")) / f"forked_backend_{os.getpid()}.py"
    module.write_text(BACKEND)
    key, started = f"{module.stem}:Engine", []

    def one(log="worker.log", cwd=None, **variables):
        worker = Worker.start(
            key, sys.executable, variables, tmp_path / log, tmp_path, cwd=cwd, imported=(module.stem,)
        )
        started.append(worker)
        return worker

    yield one
    for worker in started:
        worker.kill()
    forks.end_servers()
    module.unlink()


def settings(worker):
    worker.load(LoadRequest(checkpoint=Checkpoint(repo_id="x", path="/x"), dtype="float32", device="cpu"))
    return worker.describe().settings


def test_copies_share_one_import_and_nothing_else(start, tmp_path):
    one = settings(start(log="one.log", cwd=tmp_path, PARITY_AUDIT_SAID="one"))
    two = settings(start(log="two.log", PARITY_AUDIT_SAID="two"))

    assert one["imported_by"] == two["imported_by"] not in (one["pid"], two["pid"])
    assert one["pid"] == one["session"] != two["pid"] == two["session"]
    assert (one["cwd"], two["cwd"]) == (str(tmp_path), os.getcwd())
    assert (one["variable"], two["variable"]) == ("one", "two")
    assert one["wire"] == []
    assert [(tmp_path / f"{name}.log").read_text() for name in ("one", "two")] == ["loaded\n"] * 2


def test_variables_that_an_import_may_read_are_those_of_the_worker(start):
    one = start(OMP_NUM_THREADS="1")
    two = start(OMP_NUM_THREADS="2")
    assert settings(one)["imported_by"] != settings(two)["imported_by"]
    assert len(forks._SERVERS) == 2


def test_a_variable_that_torch_sets_while_it_runs_asks_for_no_other_server(start, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    one = settings(start())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_somebody")
    assert settings(start())["imported_by"] == one["imported_by"]


def test_servers_without_workers_are_kept_but_the_one_not_used_for_longest(start):
    def served_by(threads):
        worker = start(OMP_NUM_THREADS=str(threads))
        server = settings(worker)["imported_by"]
        worker.kill()
        return server

    first, second, third, again = (served_by(threads) for threads in (1, 2, 3, 1))
    assert again == first
    assert all(map(is_alive, (first, second, third)))

    served_by(4)
    assert [is_alive(server) for server in (first, second, third)] == [True, False, True]


def test_one_worker_ends_and_the_others_go_on(start):
    one, two = start(), start()
    settings(one)
    here = settings(two)
    one.kill()

    assert one.process.returncode == -signal.SIGKILL
    assert settings(two) == here
    assert not is_alive(one.process.pid)


def test_a_worker_whose_server_is_killed_is_said_to_be_killed_and_the_next_one_has_another(start):
    worker = start()
    server = settings(worker)["imported_by"]
    os.kill(server, signal.SIGKILL)
    worker.process.wait(20)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        worker.describe()

    assert settings(start())["imported_by"] != server


def test_what_is_killed_before_it_exists_never_begins(start, tmp_path):
    worker = start(log="never.log", SECONDS_OF_IMPORT="3")
    begun = time.monotonic()
    worker.kill()
    assert time.monotonic() - begun < 2

    settings(start(SECONDS_OF_IMPORT="3"))
    assert (tmp_path / "never.log").read_text() == ""


def test_what_is_killed_as_soon_as_it_exists_ends(start):
    for _ in range(20):
        worker = start()
        while worker.process.pid is None:
            pass
        worker.kill()
        assert worker.process.returncode == -signal.SIGKILL


def test_where_no_further_process_can_be_made_the_others_go_on(start):
    one = start(FORKS="1")
    before = settings(one)
    with pytest.raises(WorkerDied):
        settings(start(FORKS="1"))

    assert settings(one) == before


def test_an_import_that_fails_is_what_loading_fails_with(start):
    with pytest.raises(BackendFailed, match="no import today"):
        settings(start(NO_IMPORT="1"))


def test_an_engine_that_ends_the_process_that_imports_it_is_told_by_its_signal(start):
    """A vLLM that was built for processors with other instructions, for one."""
    with pytest.raises(WorkerDied, match="was killed by SIGILL during `load`"):
        settings(start(ENDS_AT_IMPORT=str(int(signal.SIGILL))))


def test_an_end_of_the_parent_ends_the_server_too(tmp_path):
    script = textwrap.dedent(
        f"""
        import os, sys
        from pathlib import Path
        from parity_audit.workers.client import Worker
        from parity_audit.workers import forks
        folder = Path({str(tmp_path)!r})
        worker = Worker.start("spec", sys.executable, {{}}, folder / "log", folder, imported=("json",))
        [server] = forks._SERVERS.values()
        print(server._process.pid, flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), 9)
        """
    )
    for how in ("killed", "ended"):
        done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True)
        pid = int(done.stdout)
        deadline = time.monotonic() + 20
        while is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not is_alive(pid), how


PORT_FILE = """
import sys
raise RuntimeError(f"transformers is imported: {'transformers' in sys.modules}")
"""


@pytest.mark.parametrize("says", [True, False])
def test_a_port_finds_imported_what_its_file_says_may_be(says, tmp_path):
    file = tmp_path / "port.py"
    file.write_text("# parity-audit: transformers may be imported before this file\n" * says + PORT_FILE)
    imported = forks.imported_before("python", f"{file}:load")
    worker = Worker.start("python", sys.executable, {}, tmp_path / "log", tmp_path, imported=imported)
    request = LoadRequest(
        checkpoint=Checkpoint(repo_id="x", path="/x"), dtype="float32", device="cpu", target=f"{file}:load"
    )

    with pytest.raises(BackendFailed, match=f"transformers is imported: {says}"):
        worker.load(request)
    worker.kill()
    forks.end_servers()


def test_a_line_that_is_not_the_whole_line_says_nothing(tmp_path):
    file = tmp_path / "port.py"
    file.write_text("# parity-audit: transformers may be imported before this file, but not today\n")

    assert forks.imported_before("python", f"{file}:load") == forks.IMPORTS["python"]
    assert forks.imported_before("python", f"{tmp_path / 'none.py'}:load") == forks.IMPORTS["python"]


@pytest.mark.parametrize("setting", ["tf32", "batch_invariant", "tensor_parallel_size", "pipeline_parallel_size"])
def test_a_worker_whose_engine_has_to_be_imported_with_other_variables_is_not_forked(setting):
    assert forks.imported_before("vllm", None, {setting, "max_num_seqs"}) == ()
    assert forks.imported_before("vllm", None, {"max_num_seqs"}) == forks.IMPORTS["vllm"]
    assert forks.imported_before("hf", None, {setting}) == forks.IMPORTS["hf"]


@pytest.mark.parametrize(("host", "engine"), [("", "hf"), ("transformer_lens==2.8.0", "hooked_transformer")])
def test_the_ports_of_the_selftest_name_the_library_that_they_use(host, engine, tmp_path):
    backend = parse_backend(write_port(tmp_path, "port", [], model="gpt2", host=host))

    assert forks.imported_before(backend.name, backend.target) == forks.IMPORTS[engine]
