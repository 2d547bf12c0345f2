"""Norms folded into what reads them are the same function; one tensor that is not so folded is a wrong tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict

PORT = Path(__file__).parents[1] / "ports" / "folded_norms.py"


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["gpt2", "gemma-2-2b-it"], ids=["layer norm, fused", "offset, tied"])
def test_a_port_with_folded_norms_is_at_parity_and_one_wrong_row_is_found(model, tmp_path):
    ports = [f"python:{PORT}:load", f"python:{PORT}:load,fault=true"]
    report = parity_audit.audit(model, candidates=ports, miniature="mini", probes=["short"], repair=False, out=tmp_path)
    folded, wrong = report.candidates

    assert (folded.verdict, folded.findings) == (Verdict.PARITY, ())
    assert any("fold_ln" in warning for warning in folded.warnings)
    assert wrong.verdict is Verdict.MISMATCH
    assert any(finding.knob == "weights" and 1 in (finding.layers or ()) for finding in wrong.findings)
