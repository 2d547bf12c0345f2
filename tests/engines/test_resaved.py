"""A checkpoint as transformers 5 saves it, and one with trained statistics: clean at parity, faults named, the candidate blamed."""

from __future__ import annotations

import pytest

import parity_audit
from parity_audit.core.report import Verdict
from parity_audit.selftest.ports import write_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MODEL = "meta-llama/Llama-3.2-1B"
PLANTS = {
    "clean": [],
    "theta": [{"op": "config", "rope_theta": 10000.0}],
    "eps": [{"op": "norm_eps", "module": "model.layers.{l}.input_layernorm", "value": 1e-3}],
}


@pytest.fixture(scope="module", params=["resaved", "real"])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    ports = [write_port(folder / "ports", name, plants, model=MODEL) for name, plants in PLANTS.items()]
    report = parity_audit.audit(
        MODEL,
        candidates=ports,
        miniature=request.param,
        probes=["short"],
        repair=False,
        out=folder / "out",
        limits=False,
    )
    return dict(zip(PLANTS, report.candidates, strict=True))


def test_a_clean_port_is_accused_of_nothing(found):
    assert found["clean"].verdict is Verdict.EXACT
    assert found["clean"].findings == ()


@pytest.mark.parametrize(
    ("name", "knob", "right", "wrong"), [("theta", "rope.theta", 5e5, 1e4), ("eps", "norm.eps", 1e-5, 1e-3)]
)
def test_a_constant_is_named_and_the_candidate_blamed(found, name, knob, right, wrong):
    (finding,) = found[name].findings

    assert finding.knob == knob
    assert finding.reference_value == pytest.approx(right, rel=1e-2)
    assert finding.candidate_value == pytest.approx(wrong, rel=1e-2)
    assert finding.departs_from_spec == "candidate"
