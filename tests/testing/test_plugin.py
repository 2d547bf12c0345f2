"""The pytest plugin in the test-suite of a sample port: passes clean, fails with layer, component, constant and patch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parity_audit.core.errors import UsageError
from parity_audit.testing import assert_parity

ROOT = Path(__file__).resolve().parents[2]
PORT = """
import torch, transformers

def load(model_path, dtype, device):
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).to(device)

def wrong(model_path, dtype, device):
    model = load(model_path, dtype, device)
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1e-3
    return model

def broken(model_path, dtype, device):
    raise RuntimeError("no kernel for this device")
"""
SUITE = """
import port

LLAMA = "meta-llama/Llama-3.2-1B"

def test_clean(parity_audit):
    report = parity_audit.assert_parity("hf", port.load, model=LLAMA, probes=["short"])
    assert report.candidates[0].verdict.value in ("exact", "parity")
    assert (parity_audit.out / "report.json").is_file()

def test_wrong(parity_audit):
    parity_audit.assert_parity("hf", port.wrong, spec="llama", model=LLAMA, probes=["short"])

def test_broken(parity_audit):
    parity_audit.assert_parity("hf", port.broken, model=LLAMA, probes=["short"])
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("port")
    (folder / "port.py").write_text(PORT)
    (folder / "test_port.py").write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "parity_audit.testing.plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "test_port.py",
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))}
    environ.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900)


def test_the_clean_port_passes_and_the_others_fail(ran):
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
    assert "2 failed" in ran.stdout


def test_the_failure_names_layer_component_constant_and_patch(ran):
    seen = re.search(r"norm\.eps in layers 0-3, seen at \S+: reference (\S+), candidate (\S+), spec 1e-05", ran.stdout)
    assert seen is not None, ran.stdout
    assert [float(seen[1]), float(seen[2])] == pytest.approx([1e-5, 1e-3], rel=1e-3)
    assert "first divergence: layer 0, blocks.0." in ran.stdout
    assert "patch for norm.eps" in ran.stdout
    assert "The candidate departs from the spec" in ran.stdout


def test_what_cannot_be_judged_fails_with_its_reason(ran):
    assert "Nothing was judged" in ran.stdout
    assert "no kernel for this device" in ran.stdout


def test_a_function_that_no_worker_can_import_is_refused():
    def load(model_path, dtype, device):
        raise AssertionError

    with pytest.raises(UsageError, match="no function of a file"):
        assert_parity("hf", load, model="gpt2")


def test_neither_spec_nor_model_is_refused():
    with pytest.raises(UsageError, match="a spec or a model"):
        assert_parity("hf", "hf")


def test_importing_the_plugin_loads_nothing_heavy():
    code = "import sys, parity_audit.testing.plugin; print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "[]\n", done.stderr
