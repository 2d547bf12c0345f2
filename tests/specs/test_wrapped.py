"""A text model that a checkpoint holds beside other modalities: its spec, its config and its tensors, as if it stood alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from wrapped_models import LATER, save

from parity_audit.core.errors import UsageError
from parity_audit.core.text_names import in_whole, text_names
from parity_audit.formulas.stored import CheckpointTensors
from parity_audit.specs import miniature
from parity_audit.specs.checkpoints import find_checkpoint, stored_names
from parity_audit.specs.load import load_spec
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.settings import edits
from parity_audit.specs.view import knob_values, reason_not_supported
from parity_audit.specs.wrapped import WRAPPED_IN, text_config

TEXT = {"gemma3": "google/gemma-3-1b-it", "llava": "meta-llama/Llama-3.2-1B"}


@pytest.fixture(params=[("gemma3", {}), ("gemma3", LATER), ("llava", {})], ids=["gemma3", "later names", "llava"])
def pair(request, cache, tmp_path):
    """The miniature alone, and the checkpoint of a larger model around it."""
    kind, names = request.param
    alone = miniature.make(resolve_model(TEXT[kind]), root=cache / "synthetic")
    return alone, save(kind, alone, tmp_path / "whole", names=names)


def test_it_has_the_spec_the_constants_and_the_tensors_of_the_text_model(pair, tmp_path):
    alone, folder = pair
    whole, text = resolve_model(str(folder)), resolve_model(alone.path)

    assert whole.spec == text.spec
    assert knob_values(whole.spec, whole.config) == knob_values(text.spec, text.config)
    assert set(stored_names(folder)) == set(stored_names(Path(alone.path)))
    ours, theirs = CheckpointTensors(folder), CheckpointTensors(Path(alone.path))
    assert ours.numbers() == theirs.numbers()
    assert all(torch.equal(ours(name), theirs(name)) for name in stored_names(folder))
    assert find_checkpoint(whole, None, homes=tmp_path / "homes").path == str(folder.resolve())


def test_its_miniature_is_a_text_model(pair, cache):
    made = miniature.make(resolve_model(str(pair[1])), root=cache / "synthetic")
    config = json.loads((Path(made.path) / "config.json").read_text())

    assert config["architectures"] == [resolve_model(pair[0].path).spec.architecture]
    assert not {WRAPPED_IN, "text_config", "vision_config"} & config.keys()


def test_the_miniature_of_one_that_was_released_inside_another_is_inside_one_too(cache):
    model = resolve_model("gemma-3-4b-it")
    made = Path(miniature.make(model, root=cache / "synthetic").path)
    config = json.loads((made / "config.json").read_text())

    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert config["vision_config"]["num_hidden_layers"] == 1
    assert config["text_config"]["query_pre_attn_scalar"] == 256
    alone = miniature.built(model).state_dict()
    held = CheckpointTensors(made)
    assert all(torch.equal(held(name), value) for name, value in alone.items() if name != "lm_head.weight")


def test_settings_of_an_engine_are_said_of_the_text_model(pair):
    whole, text = resolve_model(str(pair[1])), resolve_model(pair[0].path)
    made = [
        edits(model.spec, "vllm", "norm.eps", 1e-3, model.config, "0.32.0", {})[0].value["hf_overrides"]
        for model in (whole, text)
    ]

    assert made == [{"text_config": {"rms_norm_eps": 1e-3}}, {"rms_norm_eps": 1e-3}]


def test_a_text_model_without_a_spec_is_named(tmp_path):
    config = {"architectures": ["MllamaForConditionalGeneration"], "text_config": {"model_type": "mllama_text_model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UsageError, match="mllama_text_model") as caught:
        resolve_model(str(tmp_path))
    assert caught.value.code == "unknown-architecture"


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        (["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.head.weight"],
         {"model.norm.weight": "language_model.model.norm.weight", "lm_head.weight": "language_model.lm_head.weight"}),
        (["model.language_model.norm.weight", "lm_head.weight", "model.visual.norm.weight"],
         {"model.norm.weight": "model.language_model.norm.weight", "lm_head.weight": "lm_head.weight"}),
        (["model.norm.weight", "lm_head.weight"], {"model.norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}),
        (["model.language_models.x"], {"model.language_models.x": "model.language_models.x"}),
        ([], {}),
    ],
)  # fmt: skip
def test_names_of_tensors(stored, own):
    assert text_names(stored) == own


@pytest.mark.parametrize(
    ("path", "paths", "expected"),
    [
        ("model.layers[*].mlp", {"model": "model.language_model"}, "model.language_model.layers[*].mlp"),
        ("lm_head.weight", {"model": "model.language_model"}, "lm_head.weight"),
        ("models.x", {"model": "model.language_model"}, "models.x"),
        ("lm_head.weight", {"": "language_model"}, "language_model.lm_head.weight"),
        ("model.norm", {}, "model.norm"),
    ],
)
def test_paths_in_the_model_that_was_loaded(path, paths, expected):
    assert in_whole(path, paths) == expected


def test_a_backend_that_runs_a_text_model_only_inside_its_release_says_so():
    spec = load_spec("gemma3n")
    alone = {"model_type": "gemma3n_text"}
    inside = text_config({"model_type": "gemma3n", "text_config": alone})

    assert "Gemma3nForConditionalGeneration alone" in reason_not_supported(spec, "transformer_bridge", "4.3.0", alone)
    assert reason_not_supported(spec, "transformer_bridge", "4.3.0", inside) == ""
    assert "no release" in reason_not_supported(spec, "hooked_transformer", "3.9.0", inside)
