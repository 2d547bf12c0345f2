"""A name that a spec lists is that model, whatever folders stand in the working directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity_audit.core.errors import UsageError
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model, spec_named

NAMES = ("gemma-2-2b-it", "google/gemma-2-2b-it")


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Folders that are named like the model and hold another one."""
    monkeypatch.chdir(tmp_path)
    other = dict(resolve_model("gemma-2-2b-it").config, query_pre_attn_scalar=7, num_hidden_layers=2)
    for name in NAMES:
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text(json.dumps(other))
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_known_name_is_not_a_folder(beside, name):
    resolved = resolve_model(name)

    assert (resolved.repo_id, resolved.local) == ("google/gemma-2-2b-it", False)
    assert resolved.config["query_pre_attn_scalar"] == 256


@pytest.mark.parametrize("name", [f"./{NAMES[0]}", f"{NAMES[1]}/", "absolute"])
def test_a_path_is_the_folder(beside, name):
    resolved = resolve_model(str(beside / NAMES[0]) if name == "absolute" else name)

    assert resolved.local
    assert resolved.config["query_pre_attn_scalar"] == 7


def test_a_miniature_of_a_folder_has_a_name_that_is_no_path(beside, tmp_path):
    """Loaded by the name as typed, one backend would read the folder's weights and another the miniature's."""
    made = [
        miniature.make(resolve_model(name), root=tmp_path / "made") for name in ("./gemma-2-2b-it", "gemma-2-2b-it/")
    ]

    assert made[0] == made[1]
    assert made[0].repo_id == "local/gemma-2-2b-it"
    assert json.loads((Path(made[0].path) / "config.json").read_text())["query_pre_attn_scalar"] == 7
    assert "models--local--gemma-2-2b-it" in made[0].path


@pytest.mark.parametrize(
    ("typed", "near"), [("gema2", "`gemma2`"), ("Qwen/Qwen3-0.7B", "`Qwen/Qwen3-0.6B`"), ("zzzz", "")]
)
def test_a_wrong_name_of_a_spec_is_answered_with_the_nearest_of_specs_and_models(typed, near):
    with pytest.raises(UsageError) as error:
        spec_named(typed)

    assert error.value.code == "unknown-spec"
    assert near in error.value.hint
    assert bool(near) == bool(error.value.hint)


def test_a_model_stands_for_its_spec_and_comes_first():
    spec = spec_named("gemma-2-9b-it")

    assert (spec.name, spec.first_model) == ("gemma2", "google/gemma-2-9b-it")


def test_a_model_is_known_by_the_end_of_its_hub_id_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    end = "Mixtral-8x7B-v0.1"
    monkeypatch.chdir(tmp_path)
    assert resolve_model(end).repo_id == resolve_model(end.lower()).repo_id == f"mistralai/{end}"

    Path(end).mkdir()
    Path(end, "config.json").write_text(json.dumps(dict(resolve_model(f"mistralai/{end}").config, num_hidden_layers=2)))
    resolved = resolve_model(end)
    assert resolved.local
    assert resolved.config["num_hidden_layers"] == 2
