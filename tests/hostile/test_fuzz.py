"""Whatever is read from outside, only an error that explains itself comes out of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from parity_audit.capture.store import open_capture
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import NotJudged, ParityError, UsageError
from parity_audit.core.jsonio import from_plain
from parity_audit.core.manifest import MANIFEST_NAME, Manifest
from parity_audit.core.wire import LoadRequest, RunReply, RunRequest
from parity_audit.specs.config_check import check_config
from parity_audit.specs.expr import evaluate
from parity_audit.specs.load import load_spec
from parity_audit.specs.resolve import read_config, resolve_model, spec_for
from parity_audit.specs.safetensors_header import stored_tensors
from parity_audit.workers.channel import Channel, Ended, Garbled, TimedOut

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
LLAMA = resolve_model("meta-llama/Llama-3.2-1B")
SOUND = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()


def code_of(action: Callable[[], object]) -> str:
    """The code of the error that comes out, empty where none does. Any other exception fails the test."""
    try:
        action()
    except ParityError as error:
        return error.code
    return ""


@FUZZ
@given(st.sampled_from(sorted(LLAMA.config)), JSON)
@example("hidden_size", 10**400)
@example("rope_scaling", {"original_max_position_embeddings": "long"})
def test_a_config_with_any_value_at_any_key_is_accepted_or_refused_by_name(key, value):
    config = {**LLAMA.config, key: value}
    found = code_of(lambda: check_config(spec_for(config, "here"), config, Path("config.json")))
    assert found in ("", "bad-config", "unknown-architecture")


@FUZZ
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_config_file_is_a_mapping_or_an_error(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert code_of(lambda: read_config(tmp_path).items()) in ("", "bad-config")


@FUZZ
@given(st.binary(max_size=80))
@example(b"\xff" * 8)
def test_any_bytes_are_a_safetensors_file_or_an_error(tmp_path, content):
    check_header(tmp_path, content)


@FUZZ
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.binary(max_size=16))
def test_any_header_is_a_safetensors_file_or_an_error(tmp_path, header, body):
    text = json.dumps(header).encode()
    check_header(tmp_path, len(text).to_bytes(8, "little") + text + body)


@FUZZ
@given(st.integers(0, 7 + len(SOUND) + 8), st.integers(1, 255))
def test_a_flipped_bit_is_an_error_or_leaves_sound_tensors(tmp_path, at, flip):
    content = bytearray(len(SOUND).to_bytes(8, "little") + SOUND + bytes(8))
    content[at] ^= flip
    check_header(tmp_path, bytes(content))


def check_header(folder: Path, content: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    found = code_of(lambda: stored_tensors(path))
    assert found in ("", "bad-weights")
    assert found or sum(tensor.stop - tensor.start for tensor in stored_tensors(path)) <= len(content)


@pytest.mark.parametrize(
    "text", ["9**9**9**9", "-" * 499 + "1", "(" * 240 + "1" + ")" * 240, "'a' * 10**9", "2**-9**9**9"]
)
def test_an_expression_that_would_not_end_is_refused_at_once(text):
    started = time.process_time()
    with pytest.raises(UsageError):
        evaluate(text, {})
    assert time.process_time() - started < 1


@FUZZ
@given(st.text(alphabet="0123456789.+-*/%()<>=!'\"[]{},: abn\n\\_e", max_size=40))
def test_any_expression_is_a_value_or_an_error(text):
    assert code_of(lambda: evaluate(text, {"a": 3, "b": 0.5, "n": {"e": 1}})) in ("", "spec-expression")


@FUZZ
@given(st.text(max_size=80) | st.text(alphabet="abc:&*-[]{}!|>?%@`'\"#, \n\t<", max_size=60) | JSON.map(json.dumps))
@example("a: &a [*a]\n")
@example("? [a]\n: b\n")
@example("architecture: 2001-99-99\n")
def test_any_text_is_a_spec_or_an_error(tmp_path, text):
    path = tmp_path / f"spec{time.monotonic_ns()}.yaml"
    path.write_text(text, encoding="utf-8", errors="replace")
    found = code_of(lambda: load_spec(path))
    assert not found or found.startswith("spec")


@FUZZ
@given(st.text(max_size=40) | st.text(alphabet="hf=,.python:vlm{}[]\"'01 \x00/", max_size=40))
@example("hf,a=" + "[" * 5000)
@example("python:" + "x" * 5000)
def test_any_backend_string_is_a_backend_or_an_error(text):
    codes = ("", "unknown-backend", "backend-version", "backend-setting", "port-file")
    assert code_of(lambda: parse_backend(text)) in codes


@FUZZ
@given(
    JSON | st.fixed_dictionaries({"entries": JSON, "not_visible": JSON}),
    st.sampled_from([RunReply, RunRequest, LoadRequest, Manifest]),
)
def test_any_message_is_of_its_type_or_a_type_error(value, kind):
    with contextlib.suppress(TypeError, ValueError):
        assert isinstance(from_plain(kind, value), kind)


@FUZZ
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_manifest_is_a_capture_or_an_error(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(NotJudged) as caught:
        open_capture(tmp_path)
    assert caught.value.code == "capture-broken"


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_on_the_wire_is_a_message_or_said_to_be_none(content):
    ended = subprocess.Popen(["true"])
    ended.wait()
    read, theirs = os.pipe()
    ours, write = os.pipe()
    os.write(theirs, content + b"\n")
    os.close(theirs)
    channel = Channel(ended, read, write, Path("/nowhere"))
    with contextlib.closing(channel), contextlib.suppress(Ended, Garbled, TimedOut):
        assert isinstance(channel.receive(time.monotonic() + 5), dict)
    os.close(ours)
