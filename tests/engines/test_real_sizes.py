"""What makes an audit cheap, and what it then says that it left out."""

from __future__ import annotations

import pytest

import parity_audit
from parity_audit.capture.plan import plan_audit
from parity_audit.core.report import Verdict

pytestmark = pytest.mark.engine
USUAL = ("short", "repeated", "ragged", "left_padded", "decode", "long", "ids", "batch", "one", "two", "again")


def test_quick_names_a_cause_on_one_short_probe_and_says_what_it_left_out(tmp_path):
    report = parity_audit.audit(
        "gemma-2-2b-it", candidates="hf,attn_implementation=sdpa", miniature="mini", quick=True, out=tmp_path / "out"
    )
    candidate = report.candidates[0]
    left_out = {gap.what: gap.why for gap in report.not_tested}

    assert (candidate.verdict, report.exit_code) == (Verdict.MISMATCH, 1)
    assert [finding.knob for finding in candidate.findings] == ["attention.softcap"]
    assert (candidate.patches, candidate.patched) == ((), None)
    assert [probe["name"] for probe in report.probes] == ["short"]
    assert {f"probe {name}" for name in USUAL if name != "short"} < set(left_out)
    assert left_out["probe long"] == "left out by --quick: past the window or original context of 4096 tokens"
    assert {"detection limits", "the reference against itself (causality, padding, its other attention kernel)"} < set(
        left_out
    )
    assert "switched off with --no-repair or --quick" in {gap.why for gap in candidate.not_tested}


def test_quick_with_probes_of_ones_own_runs_those(cache):
    plan = plan_audit(
        "gpt2", synthetic="mini", seed=0, weights=None, probes=("one", "two"), dtype="float32", device="cpu", cache=cache,
        quick=True,
    )  # fmt: skip

    assert [probe.name for probe in plan.probes] == ["one", "two"]
    assert "probe short" in [gap.what for gap in plan.left_out]
