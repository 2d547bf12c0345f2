"""What an audit will need, beside what it took."""

import dataclasses
import json
import shutil

import pytest
from typer.testing import CliRunner

from parity_audit.capture.estimate import audit_cost, planned_cost
from parity_audit.capture.plan import plan_audit, side_plan
from parity_audit.capture.session import Session
from parity_audit.capture.take import take_capture
from parity_audit.cli.app import app
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import UsageError
from parity_audit.core.progress import SILENT
from parity_audit.core.wire import FLOAT64, NATIVE
from parity_audit.report.cost_content import cost_content, headline
from parity_audit.report.terminal import printed

HEADERS = 0.02
"""What the headers of the files add to the numbers of a tiny model."""


@pytest.mark.engine
@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.2-1B",
        "mistralai/Mixtral-8x7B-v0.1",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "google/gemma-3n-E2B",
    ],
)
def test_the_captures_of_an_audit_take_what_was_said(name, cache, tmp_path):
    probes = ("short", "left_padded", "decode", "ids")
    plan = plan_audit(
        name, synthetic="mini", seed=0, weights=None, probes=probes, dtype="float32", device="cpu", cache=cache
    )
    said = audit_cost(
        dataclasses.replace(plan.model, config=plan.config), plan.config, plan.probes, dtype="float32", place=tmp_path
    )
    session = Session(plan=side_plan(plan, parse_backend("hf"), install=False, progress=SILENT), log=tmp_path / "log")
    try:
        for precision in (NATIVE, FLOAT64):
            take_capture(session, plan.probes, tmp_path / precision, precision=precision)
    finally:
        session.release()

    for one in said.probes:
        for precision, expected in ((NATIVE, one.native_bytes), (FLOAT64, one.float64_bytes)):
            files = (tmp_path / precision / one.name).rglob("*.safetensors")
            assert sum(file.stat().st_size for file in files) == pytest.approx(expected, rel=HEADERS)


def test_a_model_of_real_size_is_counted_without_its_weights():
    """Gemma-2 2B has 2,614,341,888 parameters; of its text of 4160 tokens 94 are kept, all of them with a larger bound."""
    cost = planned_cost("gemma-2-2b-it", weights=None, probes=None, dtype="float32")
    tokens = sum(one.tokens for one in cost.probes)

    assert (cost.parameters, cost.weight_bytes) == (2_614_341_888, 4 * 2_614_341_888)
    assert cost.operations == 3 * 2.0 * cost.parameters * tokens
    assert cost.memory_bytes == cost.weight_bytes + 4 * 4160 * 256_000
    assert cost.disk_bytes == sum(2 * one.native_bytes + one.float64_bytes for one in cost.probes)
    long = next(one for one in cost.probes if one.name == "long")
    assert long.native_bytes == 4 * 94 * (2304 * (26 * 5 + 2) + 256_000)
    assert "positions of probe long" in [gap.what for gap in cost.left_out]
    whole = planned_cost("gemma-2-2b-it", weights=None, probes=None, dtype="float32", disk=1 << 40)
    long = next(one for one in whole.probes if one.name == "long")
    assert long.native_bytes == 4 * 4160 * (2304 * (26 * 5 + 2) + 256_000)
    said = printed(cost_content(cost), width=100, colour=False)
    assert headline(cost)[:60] in said
    assert "Without `long` it is 14.1 GB of disk" in printed(cost_content(whole), width=100, colour=False)


def test_half_the_bytes_of_a_number_are_half_of_the_weights():
    full, half = (
        planned_cost("gpt2", weights=None, probes=["short"], dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    assert full.weight_bytes == 2 * half.weight_bytes
    assert full.disk_bytes == half.disk_bytes, "captures are float32 whatever a model computes in"


@pytest.mark.parametrize(("model", "probes", "dtype"), [
    ("gpt2", ["shrt"], "float32"), ("gpt2", None, "float23"), ("no/such/model", None, "float32"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(model, probes, dtype):
    with pytest.raises(UsageError):
        planned_cost(model, weights=None, probes=probes, dtype=dtype)


def test_what_does_not_fit_here_is_said_by_the_exit_code(monkeypatch):
    assert CliRunner().invoke(app, ["plan", "gpt2", "--probe", "short", "-q"]).exit_code == 0

    monkeypatch.setattr(shutil, "disk_usage", lambda place: _Disk(free=1))
    done = CliRunner().invoke(app, ["plan", "gpt2", "--probe", "short", "--json"])
    assert done.exit_code == 3
    assert json.loads(done.stdout)["fits"] is False


@dataclasses.dataclass(frozen=True)
class _Disk:
    free: int


def test_a_token_meets_the_experts_that_are_chosen_for_it():
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 of them for a token, says its card; 8 of 128 experts in each of 48 layers."""
    cost = planned_cost("Qwen/Qwen3-30B-A3B", weights=None, probes=["short"], dtype="bfloat16")
    experts = 48 * 128 * 3 * 2048 * 768

    assert round(cost.parameters / 1e9, 1) == 30.5
    assert cost.active == cost.parameters - experts * (128 - 8) // 128
    assert cost.operations == 3 * 2.0 * cost.active * cost.probes[0].tokens
    assert f"of which a token meets {cost.active:,}" in printed(cost_content(cost), width=100, colour=False)
