"""What makes an audit cheap, and what it then says that it left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from interrupting import obey_ctrl_c

import parity_audit
from parity_audit.capture import bounded
from parity_audit.capture.plan import affordable, plan_audit
from parity_audit.capture.workspace import WORKING, kept_captures
from parity_audit.core.report import Verdict

pytestmark = pytest.mark.engine
USUAL = (
    "short", "repeated", "ragged", "left_padded", "decode", "long",
    "ids", "batch", "decode_batch", "continued", "one", "two", "again",
)  # fmt: skip


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


def test_within_a_bound_a_wrong_window_still_shows_and_the_report_says_what_was_cut(cache, tmp_path):
    """The long text keeps a hundred positions, window edges among them: they tell a window of 2048 from one of 4096."""
    question = {"probes": ("short", "long"), "miniature": "mini"}
    plan = plan_audit(
        "gemma-2-2b-it", synthetic="mini", seed=0, weights=None, probes=question["probes"], dtype="float32", device="cpu",
        cache=cache,
    )  # fmt: skip
    every = affordable(plan.probes, plan.model.spec, plan.config, wanted=None, quick=False, disk=None, repair=True)
    bound = every.needed // 2

    report = parity_audit.audit(
        "gemma-2-2b-it",
        candidates=["hf", "hf,sliding_window=2048"],
        disk=bound,
        out=tmp_path / "out",
        limits=False,
        **question,
    )
    right, wrong = report.candidates
    long = next(probe for probe in report.probes if probe["name"] == "long")

    assert (right.verdict in (Verdict.EXACT, Verdict.PARITY), wrong.verdict) == (True, Verdict.MISMATCH)
    assert (long["shape"], len(long["positions"])) == ([1, 4160], 94)
    assert "positions of probe long" in [gap.what for gap in report.not_tested]
    assert "causes that probe long alone shows" in [gap.what for gap in wrong.not_tested]
    assert {one.position for one in wrong.worst_tokens} <= set(long["positions"]) | set(range(48))
    assert max(one.position for one in wrong.worst_tokens) >= 2048


def test_a_window_that_only_the_cut_text_shows_is_named_from_a_capture_of_all_its_positions(monkeypatch, tmp_path):
    """Without --disk the captures of a large model are cut as well; what departs there is captured again whole."""
    monkeypatch.setattr(bounded, "ROOM", 1 << 20)
    monkeypatch.setattr(bounded, "LONG", 256)

    report = parity_audit.audit(
        "EleutherAI/gpt-neo-125M",
        candidates=["hf,window_size=128"],
        miniature="mini",
        repair=False,
        limits=False,
        out=tmp_path / "out",
    )
    wrong = report.candidates[0]
    long = next(probe for probe in report.probes if probe["name"] == "long")

    assert [probe["name"] for probe in report.probes] == list(USUAL)
    assert len(long["positions"]) < long["shape"][1] == 320
    assert {"positions of probe long", "sites inside blocks on probe ragged"} <= {gap.what for gap in report.not_tested}
    assert [(finding.knob, finding.candidate_value) for finding in wrong.findings] == [("attention.window", 128)]


@pytest.mark.timeout(600)
def test_ctrl_c_leaves_finished_captures_alone_and_the_next_run_uses_them(tmp_path):
    """Interrupted while the candidate loads: the reference's two captures are there, nothing else, and are not taken again.

    The cache is its own: audits of other tests come and go in the one that they share.
    """
    cache = tmp_path / "cache"
    own = {**os.environ, "PARITY_AUDIT_CACHE": str(cache)}
    command = [sys.executable, "-m", "parity_audit", "gpt2", "--miniature", "--quick", "-c", "transformer_lens"]
    command += ["--out", str(cache / "interrupted")]
    first = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=obey_ctrl_c, env=own
    )
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("load: transformer_lens"):
            break
    before = list((cache / WORKING).glob("*/"))
    first.send_signal(signal.SIGINT)
    said = first.stderr.read()
    assert (first.wait(60), "finished captures are kept for the next run (2, " in said) == (130, True)
    assert before
    assert list((cache / WORKING).glob("*/")) == []

    again = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    assert [line for line in again.stderr.splitlines() if line.startswith("reuse")] == [
        "reuse: hf in float32, captured by an audit that did not finish",
        "reuse: hf in float64, captured by an audit that did not finish",
    ]
    assert kept_captures(cache) == (0, 0)
