"""The JSON Schema of specs: up to date, true of every shipped file, and able to refuse; `spec validate` and `doctor --json`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from parity_audit.cli.app import app
from parity_audit.specs.schema import schema_text

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "model_specs").glob("*.yaml"))


def test_the_published_schema_is_up_to_date():
    assert (ROOT / "docs" / "spec.schema.json").read_text() == schema_text()
    assert CliRunner().invoke(app, ["spec", "schema"]).output == schema_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_file_is_valid_by_it(file):
    jsonschema.validate(YAML(typ="safe", pure=True).load(file.read_text()), json.loads(schema_text()))


def test_it_refuses_an_unknown_key():
    schema = json.loads(schema_text())
    assert not jsonschema.Draft202012Validator(schema).is_valid(
        {"architecture": "A", "knobs": {"norm.eps": {"valeu": "1"}}}
    )


def test_validate_names_every_mistake(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("architecture: A\nextends: llama\n")
    bad.write_text("architecture: A\nextends: llama\nknobs:\n  norm.eps: {valeu: '1'}\n")
    done = CliRunner().invoke(app, ["spec", "validate", str(good), str(bad)])

    assert done.exit_code == 2
    assert "bad.yaml:4:" in done.output
    assert "1 of 2 are valid" in done.output
    assert CliRunner().invoke(app, ["spec", "validate", *map(str, FILES)]).exit_code == 0


def test_doctor_as_json():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    names = {check["name"]: check["ok"] for check in json.loads(done.output)["checks"]}

    assert done.exit_code == 0
    assert names["hf"] is True
    assert {"uv", "cache", "memory"} <= names.keys()


@pytest.mark.parametrize(
    "file", [".github/actions/parity-audit/action.yml", "docs/examples/parity.yml", ".pre-commit-hooks.yaml"]
)
def test_what_is_given_to_other_programs_is_yaml_whose_commands_exist(file):
    text = (ROOT / file).read_text()

    assert YAML(typ="safe", pure=True).load(text)
    for command in ("ci", "spec validate"):
        if f"parity-audit {command}" in text:
            assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0
