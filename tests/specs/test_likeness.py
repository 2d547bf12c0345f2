"""Sections that take over another engine's map, and modules that are others in the last block."""

from __future__ import annotations

from pathlib import Path

import pytest

from parity_audit.core.errors import SpecError
from parity_audit.core.types import Description
from parity_audit.specs.load import load_spec
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.settings import edit_note
from parity_audit.specs.view import section, taps, weight_taps

FAMILY = """
architecture: (family)
dims: {n_layers: num_hidden_layers, d_model: hidden_size}
backends:
  vllm:
    sites:
      blocks.{l}.ln1.out: {module: "layers.{l}.norm", slice: ["0", d_model]}
      blocks.{l}.resid_post: {module: "layers.{l}"}
    not_visible: {"blocks.{l}.z": inside its kernel}
    weights: {w.weight: {path: w}}
    knobs:
      norm.eps: {read: norm.eps, edits: [{op: load, value: {hf_overrides: {eps: "=value"}}}], note: vLLM reads its config.}
      norm.offset: {read: norm.offset}
  sglang:
    like: vllm
    renamed: {hf_overrides: json_model_override_args}
    sites: {"blocks.{l}.resid_post": {module: "layers.{l+1}.norm", last: norm, take: "input_sum:0"}}
    knobs: {norm.offset: null}
"""
CHILD = """
architecture: Child
extends: family
models: {a/b: {config: {num_hidden_layers: 3, hidden_size: 4}}}
backends:
  vllm: {sites: {"blocks.{l}.mlp_out": {module: "layers.{l}.mlp"}}, not_visible: {"blocks.{l}.z": null}}
"""
MODULES = """
architecture: Modules
dims: {n_layers: num_hidden_layers, d_model: hidden_size}
models: {a/b: {config: {num_hidden_layers: 3, hidden_size: 4}}}
backends:
  hf:
    sites: {embed: {module: now}}
    variants: [{versions: "<5", sites: {embed: {module: before}}}]
  nnsight: {like: hf}
  transformer_bridge:
    sites: {embed: {module: now.hook}}
    variants: [{versions: "<3", sites: {embed: {module: old.hook}}}, {versions: "transformers <5.6", sites: {embed: null}}]
"""
CONFIG = {"num_hidden_layers": 3, "hidden_size": 4}


def child(folder: Path):
    (folder / "family.yaml").write_text(FAMILY)
    (folder / "child.yaml").write_text(CHILD)
    return load_spec(folder / "child.yaml")


def test_what_a_child_adds_for_one_engine_holds_for_the_one_that_is_like_it(tmp_path):
    spec = child(tmp_path)
    shown = {key: {tap.site: tap for tap in taps(spec, key, CONFIG, "1.0")} for key in ("vllm", "sglang")}

    assert shown["sglang"].keys() == shown["vllm"].keys()
    assert shown["sglang"]["blocks.1.mlp_out"] == shown["vllm"]["blocks.1.mlp_out"]
    assert spec.content.backends["sglang"].not_visible == {"blocks.{l}.z": None}
    assert weight_taps(spec, "sglang", CONFIG, "1.0") == weight_taps(spec, "vllm", CONFIG, "1.0") != ()


def test_the_residual_after_a_block_is_read_where_the_next_one_adds_it(tmp_path):
    found = {tap.site: (tap.module, tap.take) for tap in taps(child(tmp_path), "sglang", CONFIG, "1.0")}

    assert [found[f"blocks.{layer}.resid_post"] for layer in range(3)] == [
        ("layers.1.norm", "input_sum:0"), ("layers.2.norm", "input_sum:0"), ("norm", "input_sum:0"),
    ]  # fmt: skip


def test_load_settings_get_their_own_names_and_notes_stay_with_their_engine(tmp_path):
    spec = child(tmp_path)
    knobs = spec.content.backends["sglang"].knobs

    assert knobs["norm.eps"].edits[0].value == {"json_model_override_args": {"eps": "=value"}}
    assert spec.content.backends["vllm"].knobs["norm.eps"].edits[0].value == {"hf_overrides": {"eps": "=value"}}
    assert edit_note(spec, "sglang", "norm.eps", "1.0") == ""
    assert knobs["norm.offset"] is None


def test_shipped_gemma_has_no_setting_for_its_soft_cap_on_sglang():
    spec = resolve_model("gemma-2-2b-it").spec

    assert spec.content.backends["sglang"].knobs["attention.softcap"].edits is None
    assert spec.content.backends["vllm"].knobs["attention.softcap"].edits


@pytest.mark.parametrize(
    ("engine", "release", "module"),
    [
        ("hf", "5.19.0", "now"), ("hf", "4.57.6", "before"), ("hf", "4.57.6 on 4.57.6", "before"), ("hf", "", "now"),
        ("nnsight", "0.5.3", "now"), ("nnsight", "0.5.3 on 5.19.0", "now"), ("nnsight", "0.5.3 on 4.57.6", "before"),
        ("transformer_bridge", "4.3.0 on 5.19.0", "now.hook"), ("transformer_bridge", "2.9.0 on 5.19.0", "old.hook"),
        ("transformer_bridge", "3.0.0 on 5.5.4", None), ("transformer_bridge", "3.0.0", "now.hook"),
    ],
)  # fmt: skip
def test_modules_that_another_engine_runs_are_those_of_the_release_beneath_it(tmp_path, engine, release, module):
    (tmp_path / "modules.yaml").write_text(MODULES)
    found = section(load_spec(tmp_path / "modules.yaml"), engine, release).sites

    assert (found["embed"].module if found else None) == module


def test_a_release_in_words_names_what_runs_beneath_the_engine():
    about = Description(backend="x", package="x", version="3.0.0")

    assert about.release == "3.0.0"
    assert (
        Description(backend="x", package="x", version="3.0.0", versions={"transformers": "5.5.4"}).release
        == "3.0.0 on 5.5.4"
    )


def test_versions_that_are_none_are_an_error_of_the_file(tmp_path):
    (tmp_path / "modules.yaml").write_text(MODULES.replace("transformers <5.6", "torch 2"))

    with pytest.raises(SpecError, match="torch 2") as caught:
        load_spec(tmp_path / "modules.yaml")
    assert "modules.yaml:" in str(caught.value)
