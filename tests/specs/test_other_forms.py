"""Directories that people have and that are no checkpoint of plain weights: each is told apart, with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.specs import miniature
from parity_audit.specs.checkpoints import find_checkpoint
from parity_audit.specs.resolve import resolve_model


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    shutil.copytree(llama.path, tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **config) -> None:
    path = folder / "config.json"
    kept = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not ...}))


def test_an_adapter_is_told_from_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="an adapter of org/base") as caught:
        resolve_model(str(tmp_path))
    assert caught.value.code == "adapter-only"


def test_an_adapter_beside_whole_weights_is_left_alone(folder, tmp_path):
    (folder / "adapter_model.safetensors").write_bytes(b"no safetensors")
    found = find_checkpoint(resolve_model(str(folder)), None, homes=tmp_path)
    assert found.path == str(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4"])
def test_quantised_weights_are_refused_by_their_method(method, folder, tmp_path):
    change(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(NotJudged, match=method) as caught:
        find_checkpoint(resolve_model(str(folder)), None, homes=tmp_path)
    assert caught.value.code == "quantised-weights"


def test_the_miniature_of_a_quantised_model_has_plain_weights(folder, tmp_path):
    change(folder, quantization_config={"quant_method": "fp8"})
    made = miniature.make(resolve_model(str(folder)), root=tmp_path / "synthetic")
    assert "quantization_config" not in json.loads((Path(made.path) / "config.json").read_text())


def test_a_config_without_architectures_is_known_by_its_type(folder):
    change(folder, architectures=...)
    assert resolve_model(str(folder)).spec.architecture == "LlamaForCausalLM"
    change(folder, model_type="mamba")
    with pytest.raises(UsageError, match="model type `mamba`") as caught:
        resolve_model(str(folder))
    assert caught.value.code == "unknown-architecture"
