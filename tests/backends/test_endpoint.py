"""Servers that answer badly, over real sockets: each is an error that says what the server did."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parity_audit.backends.endpoint import Endpoint, per_token, rows
from parity_audit.backends.served import ServedBackend, recognised, require_model
from parity_audit.backends.sglang_http import _scores
from parity_audit.core.errors import BackendFailed
from parity_audit.core.rollouts import Completion
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest

CHECKPOINT = Checkpoint(repo_id="meta-llama/Llama-3.2-1B", path="/models/here")


@contextmanager
def answering(raw: bytes) -> Iterator[str]:
    """The address of a socket that gives everybody the same bytes and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with one:
                one.recv(65536)
                one.sendall(raw)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def reply(body: bytes, *, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (reply(b'{"a": 1', length=400), "server-answer", "cut off"),
        (reply(b'{"a": 1'), "server-answer", "7 bytes"),
        (b"", "server-answer", "cut off"),
        (reply(b"too many tokens", status="400 Bad Request"), "server-refused", "too many tokens"),
    ],
)
def test_a_bad_answer_is_an_error_that_says_so(raw, code, words):
    with answering(raw) as url, pytest.raises(BackendFailed, match=words) as caught:
        Endpoint(url, 5).post("/generate", {})

    assert caught.value.code == code


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    with pytest.raises(BackendFailed, match="no server answers") as caught:
        Endpoint(url, 5).get("/health")
    assert caught.value.code == "no-server"


def test_what_is_no_inference_server_is_told():
    with answering(reply(json.dumps({"hello": 1}).encode())) as url, pytest.raises(BackendFailed, match="no server of"):
        recognised(Endpoint(url, 5), LoadRequest(checkpoint=CHECKPOINT, dtype="float32", device="cpu"))


@pytest.mark.parametrize(
    "served",
    [
        "meta-llama/Llama-3.2-1B",
        "/models/here",
        "/cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/abc",
    ],
)
def test_the_right_model_is_known_by_name_directory_and_hub_cache(served):
    require_model(served, CHECKPOINT)


@pytest.mark.parametrize("served", ["meta-llama/Llama-3.2-1B-Instruct", "/models/other", ""])
def test_another_model_is_refused(served):
    with pytest.raises(BackendFailed, match="and the question is about") as caught:
        require_model(served, CHECKPOINT)
    assert caught.value.code == "server-model"


def test_fewer_numbers_than_tokens_and_fewer_answers_than_prompts_are_refused():
    assert per_token([1, 2], 2, "numbers") == [1, 2]
    with pytest.raises(BackendFailed, match="2 numbers for 3 tokens"):
        per_token([1, 2], 3, "numbers")
    with pytest.raises(BackendFailed, match="1 numbers for 2 tokens"):
        per_token([1, None], 2, "numbers")
    with pytest.raises(BackendFailed, match="1 completions for 2 prompts"):
        rows([{}], 2, "completions")


def test_a_running_server_takes_no_settings():
    request = LoadRequest(
        checkpoint=CHECKPOINT, dtype="float32", device="cpu", settings={"url": "http://127.0.0.1:1", "top": 1}
    )
    with pytest.raises(ValueError, match="the settings of a server are those it was started with"):
        ServedBackend().load(request)


@pytest.mark.parametrize(("named", "vocabulary", "fine"), [(7, 9, True), (0, 8, True), (0, 9, False), (3, 8, False)])
def test_a_scored_token_of_another_name_is_refused_but_for_the_last_id(named, vocabulary, fine):
    """SGLang 0.5.23 scores the last id of the vocabulary rightly and calls it 0."""
    given = Completion(prompt_ids=(1, 2), token_ids=(7,))
    about = {
        "input_token_logprobs": [[None, 1, None], [-2.0, 2, None], [-1.5, named, None]],
        "input_top_logprobs": [None, [[-0.1, 4, None]], [[-0.5, 5, None]]],
    }
    if fine:
        found = _scores(given, {"meta_info": about}, vocabulary)
        assert (found.logprobs, found.top1) == (((-1.5,),), (5,))
    else:
        with pytest.raises(BackendFailed, match="scored other tokens"):
            _scores(given, {"meta_info": about}, vocabulary)
