"""`benchmarks/gpu.py`: what of it can be shown without a device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def lane():
    spec = importlib.util.spec_from_file_location("gpu_lane", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_lane"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_says_so_and_writes_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path / "gpu")], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, list(tmp_path.iterdir())) == (3, [])
    assert "no CUDA device is here" in ended.stderr
    assert "nothing was run" in ended.stderr


def test_every_stage_is_a_command_that_the_program_takes(lane):
    from typer.main import get_command

    from parity_audit.cli.app import app

    assert len({stage.name for stage in lane.STAGES}) == len(lane.STAGES)
    for stage in lane.STAGES:
        words = lane.command_of(stage, "cuda", "out")
        if stage.bare is None:
            group = get_command(app)
            name, command, rest = group.resolve_command(
                group.make_context("parity-audit", ["audit"]), ["audit", *words[3:]]
            )
            assert command.make_context(name, rest).params["device"] == "cuda"
        else:
            assert words[-4:] == ["--bare", stage.bare, "--device", "cuda"]


def test_only_stages_that_ended_here_are_not_run_again(lane):
    here = lane.machine("cpu")
    ended = {"readme": {"exit_code": 0}, "vllm": {"exit_code": -1}, "tf32-on": {"exit_code": 3}}
    left = [stage.name for stage in lane.pending(lane.STAGES, {"machine": here, "stages": ended}, here)]
    assert {"readme", "tf32-on"} & set(left) == set()
    assert "vllm" in left
    assert lane.pending(lane.STAGES, {"machine": {**here, "name": "another"}, "stages": ended}, here) == list(
        lane.STAGES
    )


@pytest.mark.engine
def test_a_stage_leaves_its_verdict_time_and_versions(lane):
    """A short stage, and on the CPU: what is kept of a report is the same."""
    short = ("gpt2", "--miniature", "--quick", "-c", "hf")
    one = lane.run(lane.Stage(name="short", asks="is the script in order?", words=short), "cpu")
    said = lane.table({"machine": lane.machine("cpu"), "stages": {"short": one}})

    assert (one["exit_code"], one["as_expected"], list(one["verdicts"].values())) == (0, True, ["exact"]), one["stderr"]
    assert one["command"] == "parity-audit gpt2 --miniature --quick -c hf --device cpu -q"
    assert one["seconds"] < lane.LIMIT
    assert one["backends"]["hf"]["torch"] == torch.__version__
    assert said.startswith("# A dry run: nothing here was run on a GPU")
    assert "| short | is the script in order? | 0 | yes | hf " in said
