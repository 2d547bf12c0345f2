"""The CPU environment of SGLang: what stands for kernels that it lacks raises when called, and `doctor` says which path runs."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import parity_audit.envs
from parity_audit.cli.app import app
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import EnvFailed
from parity_audit.envs.build import python_for
from parity_audit.envs.recipes import recipe_for

FILES = Path(parity_audit.envs.__file__).parent / "files" / "sglang_cpu"
CALLED = """\
import sgl_kernel, torch, torchvision
from sgl_kernel import copy_all_layer_kv_cache_cpu
box = torch.zeros(1, 4)
for call in (
    lambda: copy_all_layer_kv_cache_cpu(box),
    lambda: sgl_kernel.rmsnorm_cpu(box, box, 1e-5),
    lambda: torch.ops.torchvision.nms(box, box[0, :1], 0.5),
    lambda: torch.ops.torchvision.qnms(box, box[0, :1], 0.5),
):
    try:
        print("returned", call())
    except NotImplementedError as error:
        print("raised", str(error).split("'")[1] if "'" in str(error) else str(error).split()[0])
"""


def test_a_missing_kernel_can_be_imported_and_raises_with_its_name_when_it_is_called():
    spec = importlib.util.spec_from_file_location("sgl_kernel", FILES / "sgl_kernel" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    kernel = module.weight_packed_linear
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.weight_packed_linear is a compiled kernel"):
        kernel(1, out=None)
    assert not hasattr(module, "__wrapped__")


@pytest.mark.engine
def test_in_the_environment_every_stand_in_raises():
    try:
        python = python_for(parse_backend("sglang")).python
    except EnvFailed as error:
        pytest.skip(f"SGLANG WAS NOT TESTED: its environment cannot be made here: {error.message}")
    done = subprocess.run([python, "-I", "-c", CALLED], capture_output=True, text=True, timeout=300)

    assert done.stdout.splitlines() == [
        "raised sgl_kernel.copy_all_layer_kv_cache_cpu", "raised sgl_kernel.rmsnorm_cpu", "raised torchvision::nms",
        "raised torchvision::qnms",
    ], done.stderr[-2000:]  # fmt: skip


TORCHVISION = {"parity_audit_torchvision.py", "parity_audit_torchvision.pth"}


@pytest.mark.parametrize(
    ("engine", "device", "beside"),
    [
        ("sglang", "cpu", {"sgl_kernel/__init__.py", *TORCHVISION}), ("sglang", "cuda", set()), ("vllm", "cpu", TORCHVISION),
        ("vllm", "cuda", set()), ("vllm==0.32.0", "cuda", set()), ("vllm==0.31.0", "cpu", set()), ("hf", "cpu", set()),
    ],
)  # fmt: skip
def test_which_environments_have_files_of_ours(engine, device, beside):
    recipe = recipe_for(parse_backend(engine), device=device)

    assert {name for name, _ in recipe.files} == beside
    assert any(pin.startswith("torchvision") for pin in recipe.alone) == bool(beside)
    assert (f"{recipe.package}=={recipe.version}" in recipe.alone) == (engine == "sglang" and device == "cpu")


def test_doctor_says_which_path_runs_and_what_it_says_nothing_about():
    said = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    own = said.partition(" sglang ")[2].partition(" uv ")[0]

    assert "torch-native path" in own
    assert "says nothing about its compiled CPU kernels, CUDA kernels, graphs and parallel engines" in own
    assert "--device cuda takes plain sglang" in own
    assert "torch-native" not in said.partition(" sglang ")[0]
