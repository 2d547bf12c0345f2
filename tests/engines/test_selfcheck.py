"""What the reference says about itself: silent where it agrees, named where it does not."""

import pytest

import parity_audit

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def self_check(model, out, reference="hf"):
    report = parity_audit.audit(
        model,
        reference=reference,
        candidates=["hf"],
        miniature="mini",
        out=out,
        probes=["short"],
        repair=False,
        limits=False,
    )
    return report.reference.self_check


def test_llama_agrees_with_itself(tmp_path):
    assert self_check("meta-llama/Llama-3.2-1B", tmp_path) == ()


@pytest.mark.parametrize(("reference", "other"), [("hf", "sdpa"), ("hf,attn_implementation=sdpa", "eager")])
def test_gemma_2_drops_its_soft_cap_in_sdpa(reference, other, tmp_path):
    notes = self_check("gemma-2-2b-it", tmp_path, reference)

    assert any(f"own {other} does not compute" in note for note in notes)
    assert not any("causal" in note or "padding" in note for note in notes)
    proposed = any("compare with `-r hf,attn_implementation=eager`" in note for note in notes)
    assert proposed is (reference != "hf")
