"""SGLang's server as the engine of `logprobs`, and its dropped soft-cap as an audit finds it by itself."""

from __future__ import annotations

import pytest

import parity_audit
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
        out=tmp_path / "out",
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
