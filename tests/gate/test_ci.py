"""The gate end to end, in a scratch repository: a wrong constant is named at its line, the right one passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import xmlschema
from own_specs import LLAMA_PORT
from typer.testing import CliRunner

from parity_audit.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = Path(__file__).parents[1] / "report" / "schemas"
KNOB = "  norm.eps: {value: %s}"
SPEC = LLAMA_PORT.format(architecture="LlamaForCausalLM") + f"knobs:\n{KNOB}\n"
LINE = SPEC.splitlines().index(KNOB) + 1


def git(folder, *args):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=folder, check=True, capture_output=True
    )


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("a port\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "start")
    git(tmp_path, "checkout", "-q", "-b", "branch")
    (tmp_path / "model_specs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARITY_AUDIT_SPECS", "")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / ".git" / "summary.md"))
    return tmp_path


def gate(*args):
    """The exit code, what was printed, and gate.json, of a process of its own."""
    command = [sys.executable, "-m", "parity_audit", "ci", "--since", "main", "-q", "--out", "out", *args]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    assert Path("out/gate.json").is_file(), done.stdout
    return done.returncode, done.stdout, json.loads(Path("out/gate.json").read_text())


def test_a_wrong_constant_is_annotated_at_its_line_and_the_right_one_passes(repository):
    file = repository / "model_specs" / "port.yaml"
    file.write_text(SPEC % "'0.000001'")
    code, said, found = gate("-b", "hf")

    assert (code, found["exit_code"]) == (1, 1)
    assert f"::error file=model_specs/port.yaml,line={LINE},title=failed%3A norm.eps::" in said
    assert "the spec says 1e-06, blocks.0.ln1.out of the reference shows 1e-05" in said
    xmlschema.XMLSchema(str(SCHEMAS / "junit-ant.xsd")).validate("out/junit.xml")
    schema = json.loads((SCHEMAS / "sarif-schema-2.1.0.json").read_text())
    jsonschema.Draft4Validator(schema).validate(json.loads(Path("out/results.sarif").read_text()))
    assert "norm.eps" in (repository / ".git" / "summary.md").read_text()

    file.write_text(SPEC % "rms_norm_eps")
    code, said, found = gate("-b", "hf")

    assert (code, found["exit_code"]) == (0, 0), said
    assert "::error" not in said
    passed = {case["name"]: case["message"] for case in found["cases"] if case["status"] == "passed"}
    assert passed.keys() >= {"constants", "changed constants", "hf 5.19.0 against the spec as a program"}
    assert passed["changed constants"].startswith("16 of 16 ")


def test_a_file_that_is_no_spec_fails_at_its_line(repository):
    (repository / "model_specs" / "port.yaml").write_text(SPEC.replace("value: %s", "valeu: x"))
    code, said, found = gate()

    assert (code, found["exit_code"]) == (1, 1)
    assert f"::error file=model_specs/port.yaml,line={LINE},title=failed%3A spec-unknown-key::" in said


def test_a_change_that_touches_nothing_is_no_pass_unless_that_is_allowed(repository):
    (repository / "README.md").write_text("other words\n")
    code, _, found = gate()
    assert (code, [case["message"] for case in found["cases"]]) == (3, ["nothing was compared"])

    code, _, found = gate("--allow-untouched")
    assert (code, found["cases"]) == (0, [])


def test_nothing_to_judge_is_a_usage_error(repository):
    assert CliRunner().invoke(app, ["ci"]).exit_code == 2
