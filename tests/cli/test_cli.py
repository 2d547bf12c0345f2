"""The command line as a new user meets it: wrong names, wrong options, clear errors, the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from parity_audit.cli import completion
from parity_audit.cli.app import app, main
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import UsageError

RUNNER = CliRunner()


def test_help_has_examples_and_exit_codes():
    shown = RUNNER.invoke(app, ["--help"])

    assert shown.exit_code == 0
    assert "parity-audit gemma-2-2b-it --miniature" in shown.output
    assert "3 could not compare" in shown.output.replace("\n", " ")


def test_version():
    assert RUNNER.invoke(app, ["--version"]).output.startswith("parity-audit ")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["gemma-2-2b-itt", "--miniature"], 2, "did you mean `gemma-2-2b-it`"),
        (["gemma-2-2b-it", "-c", "vlm", "--miniature"], 2, "did you mean `vllm`"),
        (["gemma-2-2b-it", "-c", "hf==not.a.version", "--miniature"], 2, "is not a version"),
        (["gemma-2-2b-it", "-c", "hf", "--probe", "shrt", "--miniature"], 2, "unknown probe"),
        (["gemma-2-2b-it", "--synthetic", "medium"], 2, "not a size"),
        (["gemma-2-2b-it", "-c", "hf==4.44.0", "--miniature", "--probe", "short", "--no-install"], 3, "--no-install"),
        (["diff", "nowhere", "neither"], 3, "is not a capture"),
        (["specs", "show", "nothing-like-it"], 2, "unknown model"),
        (["envs", "remove", "nothing"], 2, "no environment"),
    ],
)
def test_mistakes(args, code, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run(*args)

    assert shown.returncode == code, shown.stderr
    assert says in shown.stdout + shown.stderr
    assert "Traceback" not in shown.stderr


def run(*args):
    return subprocess.run([sys.executable, "-m", "parity_audit", *args], capture_output=True, text=True, timeout=300)


def test_a_read_only_place_is_a_clear_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    shown = run("gemma-2-2b-it", "--miniature", "--out", str(blocked / "out"))

    assert shown.returncode == 3
    assert shown.stderr.startswith("nothing was judged")
    assert "--out" in shown.stderr


def test_truncated_weights_are_found_before_any_engine_starts(tmp_path, gemma):
    import shutil

    folder = shutil.copytree(gemma.path, tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    shown = run(str(folder), "-c", "hf", "--out", str(tmp_path / "out"))

    assert shown.returncode == 3
    assert "truncated" in shown.stderr


def test_missing_weights_say_what_to_do(tmp_path, gemma):
    import shutil

    folder = shutil.copytree(gemma.path, tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    shown = run(str(folder), "-c", "hf", "--out", str(tmp_path / "out"))

    assert shown.returncode == 3
    assert "--weights" in shown.stderr


@pytest.mark.parametrize(
    ("text", "name", "version", "settings"),
    [
        ("hf", "hf", None, {}),
        ("hf==4.43.2,attn_implementation=sdpa", "hf", "4.43.2", {"attn_implementation": "sdpa"}),
        ("vllm,enforce_eager=false,seed=3", "vllm", None, {"enforce_eager": False, "seed": 3}),
        ('vllm,hf_overrides={"a": [1, 2]}', "vllm", None, {"hf_overrides": {"a": [1, 2]}}),
    ],
)
def test_backend_strings(text, name, version, settings):
    ref = parse_backend(text)
    assert (ref.name, ref.version, ref.settings) == (name, version, settings)


@pytest.mark.parametrize("text", ["hff", "hf==", "hf,sdpa", ""])
def test_malformed_backend_strings(text):
    with pytest.raises(UsageError):
        parse_backend(text)


@pytest.mark.parametrize(
    ("args", "code", "hint"),
    [
        (["adit"], "unknown-command", "the command `audit`"),
        (["spce", "check"], "unknown-command", "the command `spec`"),
        (["gemma-2-2b-it", "--dtype", "float23"], "unknown-dtype", "`float32`"),
        (["gemma-2-2b-it", "--format", "jsno"], "unknown-format", "`json`"),
        (["gemma-2-2b-it", "--timeout", "0"], "bad-number", "at least 1 second"),
        (["gemma-2-2b-it", "--miniature", "--synthetic", "full"], "usage", "drop one"),
        (["gemma-2-2b-it", "--nonsense"], "usage", "--help"),
    ],
)
def test_what_is_mistyped_is_refused_by_name_with_the_nearest(args, code, hint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parity-audit", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err

    assert ended.value.code == 2
    assert f"error[{code}]" in said
    assert hint in said


def test_what_the_parser_refuses_is_a_report_with_json(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parity-audit", "gemma-2-2b-it", "--seed", "x", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


def test_h_is_help():
    assert RUNNER.invoke(app, ["audit", "-h"]).output.startswith("Usage:")


@pytest.mark.parametrize(
    ("offer", "typed", "offered"),
    [
        (completion.models, "gemma-2-2b", "gemma-2-2b-it"),
        (completion.backends, "vl", "vllm"),
        (completion.backends, "hf==4.43", "hf==4.43.2"),
        (completion.probes, "sh", "short"),
    ],
)
def test_names_complete(offer, typed, offered):
    assert offered in offer(typed)
    assert all(name.startswith(typed) for name in offer(typed))
