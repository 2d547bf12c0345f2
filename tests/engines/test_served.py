"""A server that the user runs, asked over HTTP: the real one of each engine, and what can go wrong on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import parity_audit
from parity_audit.backends.endpoint import Endpoint
from parity_audit.backends.free_port import free_port
from parity_audit.backends.sglang_server import SERVE
from parity_audit.cli.app import app
from parity_audit.cli.errors import run_app
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import (
    EXIT_MISMATCH,
    EXIT_NOT_JUDGED,
    EXIT_OK,
    BackendFailed,
    EnvFailed,
    NotJudged,
    UsageError,
)
from parity_audit.envs.build import python_for
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MODEL = "meta-llama/Llama-3.2-1B"
SECONDS_TO_START = 300
SGLANG: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "skip_tokenizer_init": True, "disable_overlap_schedule": True, "mem_fraction_static": 0.5, "context_length": 256,
    "max_total_tokens": 2048, "max_running_requests": 16, "log_level": "error",
}  # fmt: skip
VLLM = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--served-model-name", MODEL,
)  # fmt: skip


def checkpoint(cache: Path) -> str:
    return miniature.make(resolve_model(MODEL), root=cache / "synthetic").path


def command(engine: str, python: str, path: str, port: int) -> list[str]:
    """How a user starts this engine's server."""
    if engine == "sglang":
        return [python, "-c", SERVE, json.dumps({**SGLANG, "model_path": path, "host": "127.0.0.1", "port": port})]
    where = ("--model", path, "--host", "127.0.0.1", "--port", str(port))
    return [python, "-m", "vllm.entrypoints.openai.api_server", *where, *VLLM]


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def server(request, cache, tmp_path_factory) -> Iterator[tuple[str, str]]:
    """The engine and the address of its server."""
    try:
        python = python_for(parse_backend(request.param)).python
    except EnvFailed as error:
        pytest.skip(f"{request.param.upper()}'S SERVER WAS NOT TESTED: its environment cannot be made: {error.message}")
    port, log = free_port(), tmp_path_factory.mktemp("served") / "server.log"
    environ = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command(request.param, python, checkpoint(cache), port), env=environ, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait(process, Endpoint(url, 5), log)
        yield request.param, url
    finally:
        end(process)


def wait(process: subprocess.Popen[bytes], endpoint: Endpoint, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            endpoint.get("/health")
            return
        except BackendFailed:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


def end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def arguments(url: str, out: Path, model: str = MODEL) -> list[str]:
    sizes = ("--temperature", "0.5", "--samples", "1", "--max-new-tokens", "8", "--quiet")
    return ["logprobs", model, "--miniature", "--engine-url", url, *sizes, "--out", str(out)]


@pytest.fixture
def asked(monkeypatch, capsys):
    """The command line, in this process: the exit code that it ends with, and what it printed."""

    def ask(url: str, out: Path, *more: str, model: str = MODEL) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["parity-audit", *arguments(url, out, model), *more])
        code = run_app(app)
        printed = capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    return ask


@contextmanager
def cutting(url: str, after: int) -> Iterator[str]:
    """The address of a proxy that passes on the server's answers to POST as far as `after` bytes, and hangs up."""
    host, _, port = url.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as upstream:
            asked = client.recv(1 << 20)
            head, _, body = asked.partition(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            while len(body) < length:
                more = client.recv(1 << 20)
                asked, body = asked + more, body + more
            upstream.sendall(asked)
            left = after if asked.startswith(b"POST") else 1 << 30
            while left > 0 and (part := upstream.recv(min(left, 1 << 16))):
                client.sendall(part)
                left -= len(part)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=pass_on, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def test_a_running_server_agrees_with_the_trainer_or_says_what_its_numbers_are(server, asked, tmp_path):
    """SGLang returns log-probabilities after the temperature, vLLM as it was started here those before it."""
    engine, url = server
    code, said = asked(url, tmp_path / "out", "--engine", engine)
    report = json.loads((tmp_path / "out" / "logprobs.json").read_text())
    legs = {leg["name"]: leg for leg in report["legs"]}

    assert legs["engine-decode"]["package"] == engine
    assert legs["engine-decode"]["version"]
    assert legs["engine-decode"]["noise_ratio"] <= 4.0
    assert legs["engine-prefill"]["noise_ratio"] <= 4.0
    assert legs["engine-prefill"]["meaning"].startswith("log-probability at temperature 1 ")
    if engine == "sglang":
        assert (code, report["verdict"], report["findings"]) == (EXIT_OK, "parity", []), said
        assert legs["engine-decode"]["meaning"].startswith("log-probability at temperature 0.5 ")
        assert any("SGLANG_RETURN_ORIGINAL_LOGPROB" in note for note in report["notes"])
    else:
        assert code == EXIT_MISMATCH, said
        assert [finding["name"] for finding in report["findings"]] == ["logprobs.temperature"]
        assert legs["engine-decode"]["meaning"].startswith("log-probability at temperature 1 ")


def test_an_answer_that_is_cut_off_judges_nothing(server, asked, tmp_path):
    with cutting(server[1], after=700) as url:
        code, said = asked(url, tmp_path / "out")
    assert code == EXIT_NOT_JUDGED
    assert said.startswith("nothing was judged error[server-answer]"), said
    assert f"{url} to /" in said
    assert "is cut off" in said


def test_another_model_judges_nothing(server, asked, tmp_path):
    code, said = asked(server[1], tmp_path / "out", model="Qwen/Qwen2-0.5B")
    assert code == EXIT_NOT_JUDGED
    assert said.startswith("nothing was judged error[server-model]"), said
    assert "and the question is about `Qwen/Qwen2-0.5B`" in said


def test_another_engine_judges_nothing(server, tmp_path):
    engine, url = server
    other = "vllm" if engine == "sglang" else "sglang"
    with pytest.raises(NotJudged, match=f"the server is {engine}'s, and --engine says {other}"):
        parity_audit.logprobs(MODEL, engine=other, engine_url=url, miniature="mini", presets=[], out=tmp_path / "out")


def test_a_dead_port_judges_nothing(tmp_path):
    """By the process itself. The port is bound and never listened on, so nobody else can come to listen there meanwhile."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{one.getsockname()[1]}"
        command = [sys.executable, "-m", "parity_audit", *arguments(url, tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == EXIT_NOT_JUDGED
    assert said.startswith("nothing was judged error[no-server]"), said
    assert f"no server answers at {url}" in said


@pytest.mark.parametrize("more", [{"engine_url": "127.0.0.1:80"}, {"attribute": True}, {"engine": "vllm,seed=1"}])
def test_what_a_running_server_cannot_be_asked_is_a_usage_error(more, tmp_path):
    given = {"engine_url": "http://127.0.0.1:1", "miniature": "mini", "out": tmp_path / "out", **more}
    with pytest.raises(UsageError) as caught:
        parity_audit.logprobs(MODEL, **given)
    assert caught.value.code == "engine-url"
