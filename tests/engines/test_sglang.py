"""SGLang's server as the engine of `logprobs`, its dropped soft-cap as an audit finds it by itself, its scheduler against itself."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import parity_audit
from parity_audit.cli.app import app
from parity_audit.core.backend_ref import parse_backend
from parity_audit.core.errors import EnvFailed
from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Sampling
from parity_audit.envs.build import python_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def _environment(cache):
    try:
        python_for(parse_backend("sglang"))
    except EnvFailed as error:
        pytest.skip(f"SGLANG WAS NOT TESTED: its environment cannot be made here: {error.message}")


def test_the_dropped_soft_cap_is_named_and_proved_beside_two_engines_at_parity(tmp_path):
    """Its torch-native attention knows no soft-cap, and no setting gives it one."""
    report = parity_audit.audit(
        "gemma-2-2b-it", candidates=["transformer_lens", "vllm", "sglang"], miniature="mini", probes=["short"],
        out=tmp_path / "out", limits=False,
    )  # fmt: skip
    *others, candidate = report.candidates

    assert all(one.verdict in (Verdict.EXACT, Verdict.PARITY) for one in others)
    assert (candidate.verdict, report.exit_code) == (Verdict.MISMATCH, 1)
    assert [(one.knob, one.candidate_value) for one in candidate.findings] == [("attention.softcap", None)]
    assert candidate.findings[0].reference_value == pytest.approx(50.0, rel=1e-3)
    assert candidate.patches == ()
    assert candidate.proof is not None
    assert candidate.proof.proven
    assert "a patch for attention.softcap" in {gap.what for gap in candidate.not_tested}


def test_numbers_from_before_the_temperature_are_named_and_the_switch_is_proved(tmp_path):
    report = parity_audit.logprobs(
        "meta-llama/Llama-3.2-1B", engine="sglang,return_original_logprob=true", miniature="mini", presets=[],
        sampling=Sampling(temperature=0.5, samples=2, max_new_tokens=16), out=tmp_path / "out",
    )  # fmt: skip
    finding = report.findings[0]

    assert [(one.name, one.leg) for one in report.findings] == [("logprobs.temperature", "engine-decode")]
    assert finding.settings == {"return_original_logprob": False}
    assert finding.verified is not None
    assert finding.verified.rmse_after < 1e-4 * finding.verified.rmse_before
    assert finding.verified.ratio <= 4.0
    assert all(leg.noise_ratio <= 4.0 for leg in report.legs if leg.noise_ratio is not None)


def test_batches_chunks_and_hits_of_the_radix_cache_are_those_of_its_own_counters(tmp_path):
    """261 tokens: a hot prompt computes the last of them only, and behind another prompt exactly what the two do not share."""
    sizes = ("--max-batch", "3", "--completions", "2", "--new-tokens", "3")
    asked = [
        "invariance",
        "meta-llama/Llama-3.2-1B",
        "--miniature",
        "-c",
        "sglang",
        *sizes,
        "--out",
        str(tmp_path / "out"),
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    candidate = json.loads((tmp_path / "out" / "invariance.json").read_text())["candidates"][0]
    axes = {axis["name"]: axis for axis in (*candidate["axes"], *candidate["run_to_run"])}
    facts = {
        name: {one["name"]: one["facts"] for one in axis["conditions"] if one["verdict"]} for name, axis in axes.items()
    }

    assert {name: one["cached_prompt_tokens"] for name, one in facts["prefix cache"].items()} == {
        "hot": 260, "127 tokens shared": 127, "128 tokens shared": 128, "129 tokens shared": 129,
    }  # fmt: skip
    assert {name: one["requests_per_step"] for name, one in facts["batch, decode"].items()} == {"2": 2, "3": 3}
    assert {"15": 15, "16": 16, "17": 17, "28": 28}.items() <= {
        name: one["tokens_per_step"] for name, one in facts["chunked prefill"].items()
    }.items()
    assert axes["repeat"]["verdict"] == axes["fresh process"]["verdict"] == "bitwise"
    assert candidate["control"]["fired"]
    assert {"logits_processor", "log_softmax", "model.layers.0.self_attn.qkv_proj"} <= {
        one["name"] for one in candidate["operations"]
    }
