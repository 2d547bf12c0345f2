"""Norms folded into what reads them are the same function; one tensor that is not so folded is a wrong tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict

PORT = Path(__file__).parents[1] / "ports" / "folded_norms.py"


EVERY = (None, (0, 1, 2, 3))


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "row", "first"),
    [("gpt2", ("weights", "transformer.h.1.attn.c_attn.weight"), "transformer.h.0.mlp.c_fc.weight"),
     ("gemma-2-2b-it", ("weights.attn.q", "rows 3 times 1.01"), "model.layers.0.mlp.gate_proj.weight")],
    ids=["layer norm, fused", "offset, tied"],
)  # fmt: skip
def test_a_port_with_folded_norms_is_at_parity_and_its_faults_are_found(model, row, first, tmp_path):
    faults = ["row", "activation", "left", "unloaded"]
    ports = [f"python:{PORT}:load", *(f"python:{PORT}:load,fault={fault}" for fault in faults)]
    report = parity_audit.audit(model, candidates=ports, miniature="mini", probes=["short"], repair=False, out=tmp_path)
    folded, *wrong = report.candidates

    assert (folded.verdict, folded.findings) == (Verdict.PARITY, ())
    assert any("fold_ln" in warning for warning in folded.warnings)
    assert {candidate.verdict for candidate in wrong} == {Verdict.MISMATCH}
    assert [len(candidate.findings) for candidate in wrong] == [1, 1, 1, 1]
    one_row, activation, left, unloaded = (candidate.findings[0] for candidate in wrong)
    assert (one_row.knob, one_row.layers) == (row[0], (1,))
    assert row[1] in (one_row.site, one_row.candidate_value)
    assert (activation.knob, activation.candidate_value, activation.layers) == ("mlp.activation", "silu", None)
    assert (left.knob, left.site, left.layers) == ("weights", first, (0, 1, 2, 3))
    assert "the norm before it is not folded in" in left.message
    assert (unloaded.knob, unloaded.candidate_value) == ("norm.weight", "none")
    assert unloaded.layers in EVERY
    assert not any("fold_ln" in warning for warning in wrong[-1].warnings)
