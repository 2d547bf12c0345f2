"""The package as Python code uses it: what may be passed, what is exported, and that a wheel carries its types."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import parity_audit
from parity_audit.core.backend_ref import parse_backend, report_names
from parity_audit.core.inputs import accepting, path, several, torch_name
from parity_audit.core.types import BackendRef

ROOT = Path(__file__).resolve().parents[2]


def test_a_path_may_be_text():
    assert path("~/a/b") == Path.home() / "a" / "b"
    assert path(Path("a")) == Path("a")


def test_what_is_no_path_is_a_usage_error():
    with pytest.raises(parity_audit.UsageError, match="a path is text or a Path, not int"):
        parity_audit.audit("gemma-2-2b-it", miniature="mini", candidates="hf", out=3)


@pytest.mark.parametrize("one", ["hf", BackendRef(name="vllm")])
def test_one_backend_is_a_list_of_one(one):
    assert several(one) == [one]
    assert several((one, one)) == [one, one]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        ("float16", "float16"),
        (torch.device("cuda"), "cuda"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_dtypes_and_devices_of_torch_have_names(given, name):
    assert torch_name(given) == name


def test_arguments_are_converted_by_name_and_by_position():
    @accepting(b=int, c=int)
    def function(a, b, *, c=None):
        return a, b, c

    assert function("1", "2") == ("1", 2, None)
    assert function(a="1", b="2", c="3") == ("1", 2, 3)


@pytest.mark.parametrize("name", [name for name in parity_audit.__all__ if name != "__version__"])
def test_every_exported_name_is_there(name):
    assert getattr(parity_audit, name).__name__ == name


def test_exports_are_read_on_first_use():
    code = "import sys, parity_audit\nprint('torch' in sys.modules, 'parity_audit.core.report' in sys.modules, "
    code += "parity_audit.Verdict.PARITY.value, parity_audit.WorkerDied.exit_code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert done.stdout == "False False parity 3 False\n", done.stderr


@pytest.fixture
def ports(tmp_path):
    files = [tmp_path / name for name in ("a/port.py", "b/port.py", "c.py")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    return [parse_backend(f"python:{file}:{function}") for file in files for function in ("load", "other")]


def test_ports_are_named_after_file_and_function_and_no_more_path_than_needed(ports):
    assert report_names([*ports, BackendRef(name="hf")]) == [
        "python:a/port.py:load", "python:a/port.py:other", "python:b/port.py:load", "python:b/port.py:other",
        "python:c.py:load", "python:c.py:other", "hf",
    ]  # fmt: skip
    assert report_names(ports[:1]) == ["python:port.py:load"]


def test_a_wheel_says_that_it_is_typed(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()

    assert "parity_audit/py.typed" in names
    assert "parity_audit/envs/locks/transformer-lens-2.3.0.txt" in names
    assert "parity_audit/model_specs/gemma2.yaml" in names


def test_a_loaded_model_among_candidates_is_refused_in_words():
    with pytest.raises(parity_audit.UsageError) as raised:
        parity_audit.audit("gpt2", candidates=[torch.nn.Linear(2, 2)], miniature="mini")

    assert raised.value.code == "unknown-backend"
    assert "audit_live" in str(raised.value.hint)
