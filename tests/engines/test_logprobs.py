"""`logprobs` with the real vLLM: the clean case, and engine settings that change what its numbers are."""

from __future__ import annotations

import pytest

import parity_audit
from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Sampling

pytestmark = pytest.mark.engine


def test_both_legs_of_the_engine_agree_with_the_trainer(tmp_path):
    """Gemma-2: soft-capped logits, sliding windows; 256 sampled tokens."""
    report = parity_audit.logprobs(
        "gemma-2-2b-it", miniature="mini", sampling=Sampling(samples=2, max_new_tokens=16), presets=["verl"],
        out=tmp_path / "out",
    )  # fmt: skip

    assert (report.verdict, report.findings, report.exit_code) == (Verdict.PARITY, (), 0)
    assert [leg.name for leg in report.legs] == ["engine-decode", "engine-prefill", "trainer", "judge"]
    assert all(leg.noise_ratio <= 4.0 for leg in report.legs if leg.noise_ratio is not None)
    assert report.pairs[0].tokens == 256
    assert not any(row.raised for row in report.presets["verl"])
    assert "<svg" in (tmp_path / "out" / "logprobs.html").read_text()


def test_a_wrong_constant_of_the_engine_is_named_by_its_layers(tmp_path):
    """The attention scale of Gemma-2 is 1/sqrt(query_pre_attn_scalar): 16 from 256, 14.1421 from 200."""
    report = parity_audit.logprobs(
        "gemma-2-2b-it", engine='vllm,hf_overrides={"query_pre_attn_scalar":200}', miniature="mini", explain=True,
        sampling=Sampling(samples=1, max_new_tokens=16), out=tmp_path / "out",
    )  # fmt: skip

    assert report.odd_leg == "engine"
    assert [finding.name for finding in report.findings] == ["attention.scale"]
    assert report.findings[0].evidence["candidate"].startswith("14.14")
    assert (tmp_path / "out" / "layers" / "report.json").is_file()


def test_an_engine_with_a_bfloat16_head_at_another_temperature(tmp_path):
    """Two faults at once: raw log-probabilities of tokens drawn at 0.7, and logits computed in bfloat16."""
    report = parity_audit.logprobs(
        "meta-llama/Llama-3.2-1B", engine='vllm,hf_overrides={"head_dtype":"bfloat16"}', miniature="mini",
        sampling=Sampling(temperature=0.7, samples=2, max_new_tokens=16), out=tmp_path / "out",
    )  # fmt: skip

    assert [(finding.name, finding.leg) for finding in report.findings] == [
        ("logprobs.temperature", "engine-decode"),
        ("head.dtype", "engine"),
    ]
    assert report.exit_code == 1
    first, second = (finding.verified for finding in report.findings)
    assert first is not None
    assert first.rmse_after < 0.01 * first.rmse_before  # the bfloat16 head is still there
    assert second is not None
    assert second.rmse_before == first.rmse_after
    assert second.ratio <= 4.0
