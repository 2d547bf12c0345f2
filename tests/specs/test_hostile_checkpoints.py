"""Checkpoints that cannot be believed, and the loader's own report of what it would have to draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_audit.backends.hf import HfBackend
from parity_audit.core.errors import NotJudged, ParityError, UsageError
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest
from parity_audit.specs.checkpoints import check_weights
from parity_audit.specs.config_check import check_config
from parity_audit.specs.installed import configuration_class
from parity_audit.specs.load import list_specs, load_spec
from parity_audit.specs.resolve import resolve_model

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(llama, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(llama.path) / name).read_bytes())
    return tmp_path


def rewrite(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_found(folder, value):
    rewrite(folder, lambda tensors: tensors[NAME].view(-1)[17].fill_(value))
    with pytest.raises(NotJudged, match=f"{NAME} holds 1 NaN or infinite") as caught:
        check_weights(folder, [folder / "model.safetensors"])
    assert caught.value.code == "non-finite-weights"


def test_a_sound_checkpoint_is_believed(folder):
    check_weights(folder, [folder / "model.safetensors"])


def test_an_index_that_names_a_lost_file_is_missing_tensors(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lost": "model-2.safetensors"}}))
    with pytest.raises(NotJudged) as caught:
        check_weights(folder, [folder / "model.safetensors"])
    assert caught.value.code == "missing-tensors"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop(NAME), "does not hold"),
        (lambda tensors: tensors.update({NAME: torch.ones(3, 3)}), "holds in another shape"),
    ],
)
def test_a_tensor_that_the_loader_would_draw_is_an_error(folder, change, says):
    rewrite(folder, change)
    checkpoint = Checkpoint(repo_id="x", path=str(folder))
    with pytest.raises(ParityError, match=f"{says} {NAME}") as caught:
        HfBackend().load(LoadRequest(checkpoint=checkpoint, dtype="float32", device="cpu"))
    assert caught.value.code == "missing-tensors"


def test_a_tensor_that_the_model_does_without_need_not_be_there(folder):
    rewrite(folder, lambda tensors: tensors.pop(NAME))
    checkpoint = Checkpoint(repo_id="x", path=str(folder))
    HfBackend().load(LoadRequest(checkpoint=checkpoint, dtype="float32", device="cpu", unread=(NAME,)))


def test_an_architecture_that_transformers_does_not_have_is_no_failure_of_it(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama9"}))
    checkpoint = Checkpoint(repo_id="x", path=str(folder))
    with pytest.raises(NotJudged, match="no model type `llama9`") as caught:
        HfBackend().load(LoadRequest(checkpoint=checkpoint, dtype="float32", device="cpu"))
    assert caught.value.code == "cannot-run"


def test_every_released_config_is_accepted():
    models = [(spec, entry.config) for spec in list_specs() for entry in spec.content.models.values()]
    for spec, config in models:
        check_config(spec, config, Path("config.json"))
    assert len(models) > 50


def test_every_released_config_is_accepted_as_transformers_saves_it():
    """Qwen1.5-MoE, whose window is switched off, is saved with a window of no tokens."""
    windows = set()
    released = [(known, entry.config) for known in list_specs() for entry in known.content.models.values()]
    for spec, config in released:
        of_kind = configuration_class(config)
        if of_kind is None:
            continue
        saved = json.loads(
            of_kind(**{key: value for key, value in config.items() if key != "model_type"}).to_json_string()
        )
        check_config(spec, saved, Path("config.json"))
        windows.add(saved.get("sliding_window"))
    assert 0 in windows


def test_a_window_of_no_tokens_that_is_switched_on_is_refused():
    model = resolve_model("Qwen/Qwen1.5-MoE-A2.7B")
    with pytest.raises(UsageError, match="`sliding_window` is 0"):
        check_config(model.spec, {**model.config, "sliding_window": 0, "use_sliding_window": True}, Path("config.json"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "128"), ("num_hidden_layers", 10**9), ("rms_norm_eps", float("nan")), ("rope_theta", {}), ("vocab_size", 0)],
)  # fmt: skip
def test_a_config_that_no_model_has_is_refused_by_name(key, value):
    model = resolve_model("meta-llama/Llama-3.2-1B")
    with pytest.raises(UsageError) as caught:
        check_config(model.spec, {**model.config, key: value}, Path("config.json"))
    assert caught.value.code == "bad-config"


def test_aliases_that_would_fill_the_memory_are_refused(tmp_path):
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (tmp_path / "bomb.yaml").write_text(bomb)
    with pytest.raises(UsageError, match="too many values"):
        load_spec(tmp_path / "bomb.yaml")


@pytest.mark.parametrize("size", [0, -4])
def test_a_size_that_one_kind_of_layer_has_is_checked_too(size):
    known = resolve_model("google/gemma-4-E2B")

    with pytest.raises(UsageError) as raised:
        check_config(known.spec, {**known.config, "global_head_dim": size}, Path("config.json"))

    assert f"d_head of layer 4 would be {size}" in raised.value.message
