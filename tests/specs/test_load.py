"""Spec files: what is shipped is valid, and every mistake names file, line and key."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.core.errors import SpecError, UsageError
from parity_audit.specs.load import list_specs, load_spec
from parity_audit.specs.view import knob_values


def test_shipped_specs_are_valid():
    assert {spec.architecture for spec in list_specs()} >= {"Gemma2ForCausalLM", "LlamaForCausalLM"}


@pytest.mark.parametrize("options", [[], ["--mutate"]])
def test_a_family_has_no_model_to_check(options):
    done = CliRunner().invoke(app, ["spec", "check", "llama_like", "-q", *options])

    assert done.exit_code == 2
    assert "spec-models" in done.stderr
    assert "llama_like.yaml" in done.stderr


def _error(tmp_path: Path, text: str) -> SpecError:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(path) in caught.value.where
    return caught.value


def test_unknown_key_names_line_and_nearest(tmp_path):
    error = _error(tmp_path, "architecture: X\nknobs:\n  attention.softcap:\n    valeu: '50'\n")

    assert error.where.split()[0].endswith(":4:5")
    assert "value" in error.hint


@pytest.mark.parametrize(("text", "nearest"), [
    ("modls: {}", "models"),
    ("models:\n  a/b:\n    alias: [c]", "aliases"),
    ("backends:\n  hf:\n    site: {}", "sites"),
    ("backends:\n  hf:\n    sites:\n      embed: {modul: x}", "module"),
    ("backends:\n  hf:\n    knobs:\n      rope.theta:\n        edits:\n          - {pth: x}", "path"),
    ("backends:\n  hf:\n    variants:\n      - {version: '<5'}", "versions"),
    ("backends:\n  hf:\n    variants:\n      - versions: '<5'\n        knobs:\n          rope.theta: {edit: []}", "edits"),
])  # fmt: skip
def test_a_wrong_key_names_the_nearest_wherever_it_stands(tmp_path, text, nearest):
    assert _error(tmp_path, f"architecture: X\n{text}\n").hint == f"did you mean `{nearest}`?"


@pytest.mark.parametrize(("knob", "line"), [
    ("value: l + + * 1", ":4:5"),
    ("value: 'lambda: 1'", ":4:5"),
    ("value: '2'\n    when: '[x for x in y]'", ":5:5"),
    ("value: '2'\n    layers: l %", ":5:5"),
])  # fmt: skip
def test_what_is_no_expression_is_told_where_it_stands(tmp_path, knob, line):
    error = _error(tmp_path, f"architecture: X\nknobs:\n  attention.scale:\n    {knob}\n")

    assert error.where.split()[0].endswith(line)
    assert "expression" in error.message


def test_an_edit_that_is_no_expression_is_told_where_it_stands(tmp_path):
    edits = "[{path: x, value: {a: [0, '=2 *']}}]"
    error = _error(tmp_path, f"architecture: X\nbackends:\n  hf:\n    knobs:\n      a.b:\n        edits: {edits}\n")

    assert error.where.split()[0].endswith(":6:27")
    assert "`2 *` is not an expression" in error.message


@pytest.mark.parametrize(("value", "says"), [
    ("n_haeds * 2", "did you mean `n_heads`?"),
    ("sqrt(-1)", "math domain error"),
])  # fmt: skip
def test_a_value_that_no_config_gives_is_told_by_its_line(tmp_path, value, says):
    path = tmp_path / "own.yaml"
    path.write_text(f"architecture: GPT2LMHeadModel\nextends: gpt2\nknobs:\n  attention.scale:\n    value: {value}\n")
    config = load_spec("gpt2").content.models["gpt2"].config
    with pytest.raises(SpecError) as caught:
        knob_values(load_spec(path), config)

    assert caught.value.where == f"{path}:4   knobs.attention.scale"
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_duplicate_key(tmp_path):
    assert "duplicate" in _error(tmp_path, "architecture: X\narchitecture: Y\n").message.lower()


def test_broken_yaml_names_the_line(tmp_path):
    assert ":2:" in _error(tmp_path, "architecture: [X\nknobs: {\n").where


def test_python_tags_are_refused(tmp_path):
    _error(tmp_path, "architecture: !!python/object/apply:os.system ['true']\n")


def test_extends_in_a_circle(tmp_path):
    (tmp_path / "a.yaml").write_text("architecture: A\nextends: b\n")
    (tmp_path / "b.yaml").write_text("architecture: B\nextends: a\n")
    with pytest.raises(SpecError, match="circle"):
        load_spec(tmp_path / "a.yaml")


def test_unknown_spec_suggests_the_nearest():
    with pytest.raises(UsageError) as caught:
        load_spec("gema2")
    assert "gemma2" in caught.value.hint
