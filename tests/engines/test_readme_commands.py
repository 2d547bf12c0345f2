"""The README's commands as they are written: each is run here, or is parsed here and run by the engine test that is named."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interrupting import obey_ctrl_c
from typer.main import get_command

from parity_audit.cli.app import app
from parity_audit.core.backend_ref import parse_backend
from parity_audit.envs.recipes import recipe_for
from parity_audit.matrix.cells import expanded
from parity_audit.specs.resolve import resolve_model

ROOT = Path(__file__).resolve().parents[2]
RUN_HERE = (
    "parity-audit capture gemma-2-2b-it --miniature -b hf --judge --out captures/hf",
    "parity-audit capture gemma-2-2b-it --miniature -b vllm --out captures/vllm",
    "parity-audit diff captures/hf captures/vllm",
    "parity-audit doctor",
)
RUN_BY = {
    "parity-audit gemma-2-2b-it --miniature -c transformer_lens -c vllm -c sglang": (
        "engines/test_sglang.py::test_the_dropped_soft_cap_is_named_and_proved_beside_two_engines_at_parity"
    ),
    "parity-audit gemma-2-2b-it --miniature": "engines/test_audits.py::test_clean_ports_are_at_parity_without_a_finding",
    "parity-audit gemma-2-2b-it --miniature -r hf==4.43.2,attn_implementation=sdpa -c transformer_lens==2.3.0": (
        "engines/test_audits.py::gemma_2024"
    ),
    "parity-audit meta-llama/Llama-3.2-1B --miniature -r hf==4.45.2 -c transformer_lens==2.8.0": (
        "engines/test_audits.py::test_llama_3_2_in_2024"
    ),
    "parity-audit gemma-2-2b-it --miniature -c hf,attn_implementation=sdpa": (
        "engines/test_audits.py::test_sdpa_drops_the_soft_cap_of_gemma_2"
    ),
    "parity-audit meta-llama/Llama-3.2-1B --miniature -c python:./my_port.py:load": (
        "engines/test_ports.py::test_a_right_port_is_at_parity"
    ),
    "parity-audit meta-llama/Llama-3.2-1B --miniature -c transformer_lens --hooks": (
        "engines/test_ports.py::test_edited_hooks_are_told_from_hooks_that_nothing_reads"
    ),
    "parity-audit gpt2 --miniature -c nnsight --hooks": (
        "backends/test_nnsight.py::test_every_site_and_every_edit_is_that_of_transformers"
    ),
    "parity-audit logprobs gemma-2-2b-it --miniature --engine vllm": (
        "engines/test_logprobs.py::test_both_legs_of_the_engine_agree_with_the_trainer"
    ),
    "parity-audit invariance gemma-2-2b-it --miniature -c hf -c transformer_lens -c vllm": (
        "invariance/test_engines.py::test_three_engines_depend_on_the_batch_by_rounding_at_most"
    ),
    "parity-audit check-divergence my_losses.py:jsd": "cli/test_divergence.py::test_the_three_variants",
    "parity-audit spec check my_spec.yaml": "speccheck/test_check.py::",
    "parity-audit matrix gpt2 gemma-2-2b-it --miniature -c 'transformer_lens=={3.9.0,4.3.0}'": (
        "matrix/test_cards.py::test_the_command_audits_keeps_a_card_and_shows_it_again"
    ),
    "parity-audit matrix --file reports/matrix.yaml --on ray": (
        "matrix/test_fleet_ray.py::test_a_fleet_is_stopped_resumed_and_loses_a_node_and_no_cell"
    ),
    "parity-audit ci --since main": "gate/test_ci.py::test_a_wrong_constant_is_annotated_at_its_line_and_the_right_one_passes",
    "parity-audit lint --all -c transformer_lens==2.3.0": (
        "lint/test_lint.py::test_the_release_of_2024_has_the_wrong_scale_in_its_table"
    ),
    "parity-audit bisect gemma-2-2b-it -c transformer_lens --good 2.4.0 --bad 2.3.0": (
        "bisection/test_releases.py::test_the_release_that_repaired_the_scale_of_gemma_2_is_named"
    ),
    "parity-audit gemma-2-2b-it --miniature --quick": (
        "engines/test_real_sizes.py::test_quick_names_a_cause_on_one_short_probe_and_says_what_it_left_out"
    ),
    "parity-audit gemma-2-2b-it --miniature --disk 10GiB": (
        "engines/test_real_sizes.py::test_within_a_bound_a_wrong_window_still_shows_and_the_report_says_what_was_cut"
    ),
    "parity-audit plan gemma-2-2b-it": (
        "capture/test_estimate.py::test_a_model_of_real_size_is_counted_without_its_weights"
    ),
    "parity-audit selftest": "selftest/test_score.py::",
}


def commands() -> list[str]:
    """Every command line of the README's code blocks, without its comment and its prompt."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = (line.removeprefix("$ ").partition(" #")[0].strip() for block in blocks for line in block.splitlines())
    found = (
        line[line.index("parity-audit ") :] for line in lines if re.match(r"(python3 .*)?(\S*/)?parity-audit ", line)
    )
    return list(dict.fromkeys(found))


def parsed(line: str) -> tuple[str, dict[str, object]]:
    """The command that the real parser finds in a line, and its parameters; nothing is run."""
    group = get_command(app)
    context = group.make_context("parity-audit", shlex.split(line)[1:])
    path, words = [], [*context._protected_args, *context.args]
    while hasattr(group, "resolve_command"):
        name, group, words = group.resolve_command(context, words)
        path.append(str(name))
        context = group.make_context(name, list(words), parent=context)
        words = [*context._protected_args, *context.args]
    return " ".join(path), context.params


def test_every_command_is_run_somewhere():
    assert len(commands()) >= 10
    assert set(commands()) == {*RUN_HERE, *RUN_BY}


@pytest.mark.parametrize("line", RUN_BY)
def test_a_command_is_one_that_the_parser_takes(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_port.py").write_text("def load(model_path, dtype, device): ...\n")
    name, given = parsed(line)

    assert name in (
        "audit", "spec check", "selftest", "logprobs", "check-divergence", "invariance", "matrix", "ci", "lint", "bisect",
        "plan",
    )  # fmt: skip
    candidates = given.get("candidate") or ()
    named = [candidates] if isinstance(candidates, str) else [*candidates]
    given_backends = [*named, *filter(None, [given.get("reference")])]
    for backend in (one for text in given_backends for one in expanded(str(text))):
        assert recipe_for(parse_backend(str(backend))).requirements
    assert "model" not in given or name != "audit" or resolve_model(str(given["model"])).config


@pytest.mark.parametrize("test", RUN_BY.values())
def test_the_engine_test_that_is_named_is_there(test):
    file, _, name = test.partition("::")
    assert f"def {name}" in (ROOT / "tests" / file).read_text()


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one line in a shell, in which `parity-audit` is the one of this interpreter."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(line, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=900)


@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_the_commands_run_one_after_another_as_they_are_written(tmp_path):
    assert ENDS[0] in RUN_HERE
    for line in [line for line in commands() if line in RUN_HERE]:
        done = shell(line, tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert (tmp_path / "captures" / "hf" / "judge" / "manifest.json").is_file()
    assert (tmp_path / "captures" / "vllm" / "manifest.json").is_file()


def interrupted(folder: Path) -> int:
    """The exit code of an audit that gets Ctrl-C while it loads."""
    command = [sys.executable, "-m", "parity_audit", "gpt2", "--miniature", "-c", "hf", "--out", str(folder / "out")]
    audit = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=obey_ctrl_c
    )
    assert audit.stderr is not None
    next(line for line in audit.stderr if line.startswith("load"))
    audit.send_signal(signal.SIGINT)
    audit.communicate(timeout=120)
    return audit.returncode


ENDS = {
    0: "parity-audit diff captures/hf captures/vllm",
    1: "parity-audit gemma-2-2b-it --miniature --probe short --no-repair -c hf,attn_implementation=sdpa --out out -q",
    2: "parity-audit gemma-2-2b-itt --miniature",
    3: "parity-audit diff nowhere neither",
}


def test_these_are_the_exit_codes_of_the_manual():
    table = re.findall(r"^\| (\d+) \| ", (ROOT / "README.md").read_text(), re.MULTILINE)
    errors = re.findall(r"^\| `[a-z-]+` \| (\d+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)

    assert {int(code) for code in table} == {*ENDS, 130}
    assert {int(code) for code in errors} <= {*ENDS, 130}


@pytest.mark.engine
@pytest.mark.parametrize("code", [1, 2, 3])
def test_an_exit_code_is_reached(code, tmp_path):
    done = shell(ENDS[code], tmp_path)
    assert done.returncode == code, (done.stdout, done.stderr)


@pytest.mark.engine
def test_ctrl_c_is_130(tmp_path):
    assert interrupted(tmp_path) == 130
