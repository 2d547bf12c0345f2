"""Faults of sharding through whole audits: a running vLLM engine on two ranks is the candidate, and its report says what is wrong.

A fault is an edit that the engine gets when it is loaded, before it is asked anything: the candidates of one audit are told
apart by their seed.
"""

from __future__ import annotations

import pytest

from parity_audit.api import audit
from parity_audit.audit import context
from parity_audit.capture.session import Session
from parity_audit.core.report import Verdict
from parity_audit.core.types import Edit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
CUT = "vllm,tensor_parallel_size=2,seed={}"
MISSING = Edit(op="set", path="model.layers[1].self_attn.o_proj.reduce_results", value=False)
HEADS = Edit(op="part_of_next_rank", path="model.layers[2].self_attn.qkv_proj", value={"parts": [1, 2], "rank": 1})
BIAS = Edit(op="set", path="rank 1: transformer.h[1].attn.c_proj.tp_rank", value=0)
CASES = {
    "meta-llama/Llama-3.2-1B": (
        (MISSING, "sharding.all_reduce", 1, [], "the sum over the ranks is missing after blocks.1.attn_out"),
        (HEADS, "sharding.kv_heads", 2, [1], "rank 1 holds part of rank 0"),
    ),
    "gpt2": ((BIAS, "sharding.bias", 1, [], "the bias of blocks.1.attn_proj is added on each of the 2 ranks"),),
}


@pytest.mark.parametrize("model", CASES)
def test_a_planted_fault_is_the_one_finding_of_the_report(model, monkeypatch):
    planted = {seed: case[0] for seed, case in enumerate(CASES[model])}

    def session(**how):
        fault = planted.get(how["plan"].ref.settings.get("seed"))
        return Session(**how, edits=() if fault is None else (fault,))

    monkeypatch.setattr(context, "Session", session)
    report = audit(
        model, candidates=[CUT.format(seed) for seed in planted], miniature="mini", probes=["short"], limits=False
    )

    assert report.exit_code == 1
    for candidate, (_, knob, layer, ranks, said) in zip(report.candidates, CASES[model], strict=True):
        assert candidate.verdict is Verdict.MISMATCH
        assert [finding.knob for finding in candidate.findings] == [knob]
        (finding,) = candidate.findings
        assert (finding.layers, finding.evidence["ranks"]) == ((layer,), ranks)
        assert said in candidate.why
        assert candidate.why == finding.message
        assert candidate.patches == ()
        assert "other causes, and repair" in {gap.what for gap in candidate.not_tested}
