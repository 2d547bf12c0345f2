"""References that cannot run in float64 are judged by the definition in transformers, and are judged themselves."""

import pytest

import parity_audit
from parity_audit.core.report import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
GOOD = (Verdict.EXACT, Verdict.PARITY)
PROBES = ("short", "left_padded")


def audit(out, reference, candidate, *, limits=False, **more):
    return parity_audit.audit(
        "gemma-2-2b-it",
        reference=reference,
        candidates=[candidate],
        miniature="mini",
        out=out,
        probes=PROBES,
        limits=limits,
        **more,
    )


def test_two_right_programs_agree_whoever_is_believed(tmp_path):
    report = audit(tmp_path, "transformer_lens==2.18.0", "vllm", limits=True)

    assert report.candidates[0].verdict in GOOD, report.candidates[0].why
    assert report.candidates[0].findings == ()
    assert report.judge.backend == "hf"
    assert report.judge.dtype == "float64"
    assert any("cannot run so itself" in note for note in report.reference.self_check)
    assert not any("departs" in note for note in report.reference.self_check)
    assert report.candidates[0].detection_limits["attention.scale"] < 0.01


def test_a_wrong_reference_is_not_a_noise_floor(tmp_path):
    """TransformerLens 2.3.0 divides Gemma-2's scores by sqrt(224); believed, it makes hf the odd one out, not right."""
    report = audit(tmp_path, "transformer_lens==2.3.0", "hf")
    right = report.candidates[0]

    assert any("the reference itself departs" in note for note in report.reference.self_check)
    assert right.verdict is Verdict.MISMATCH
    found = {finding.knob: finding for finding in right.findings}
    assert found["attention.scale"].reference_value == pytest.approx(224**0.5, rel=1e-4)
    assert found["attention.scale"].candidate_value == pytest.approx(16, rel=1e-4)
    assert found["attention.scale"].departs_from_spec == "reference"
    assert right.right_reference.verdict in GOOD
    assert right.patches == ()


def test_an_attention_of_transformers_that_departs_from_the_spec_is_the_one_that_is_named(tmp_path):
    """Falcon's eager attention adds ALiBi twice: its mask has the penalties already, as sdpa needs them."""
    eager, sdpa = parity_audit.audit(
        "falcon-rw-1b",
        reference="spec",
        candidates=["hf", "hf,attn_implementation=sdpa"],
        miniature="mini",
        out=tmp_path,
        probes=PROBES,
        limits=False,
        repair=False,
    ).candidates

    (found,) = eager.findings
    assert (found.knob, found.departs_from_spec) == ("attention.alibi", "candidate")
    assert (found.reference_value, found.candidate_value) == (0.125, pytest.approx(0.25, rel=1e-6))
    assert sdpa.verdict in GOOD
    assert sdpa.findings == ()
