"""One candidate may do anything: the true cause is reported, and the candidates before and after it are complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
LLAMA = "meta-llama/Llama-3.2-1B"
PORT = Path(__file__).parents[1] / "ports" / "misbehaving.py"
SITES = PORT.with_name("plain_llama_sites.yaml")
WAYS = {  # how the port fails: (verdict, error code, words of the cause)
    "clean": (Verdict.EXACT, None, "bit-identical"),
    "sys-exit-0": (Verdict.ERROR, "backend-failed", "SystemExit: 0"),
    "fork-detached": (Verdict.ERROR, "worker-died", "exit code 3 during `load`"),
    "hang": (Verdict.ERROR, "timeout", "did not answer `load` in 60 s"),
    "wire-list": (Verdict.ERROR, "bad-answer", "not a JSON object"),
    "memory-torch": (Verdict.ERROR, "out-of-memory", "allocate memory"),
    "nan-column": (Verdict.INCONCLUSIVE, None, "not finite: short/logits"),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    ports = [f"python:{PORT}:load,sites={SITES},how={how}" for how in (*WAYS, "clean")]
    out = tmp_path_factory.mktemp("failures")
    (out / "report.json").write_text("of an earlier run")
    return parity_audit.audit(
        LLAMA, candidates=ports, miniature="mini", probes=["short"], out=out, timeout=60, limits=False
    )


@pytest.mark.parametrize(("number", "how"), enumerate(WAYS))
def test_the_cause_is_the_true_one(report, number, how):
    found = report.candidates[number]
    verdict, code, words = WAYS[how]

    assert (found.verdict, (found.error or {}).get("code")) == (verdict, code), found.why
    assert words in found.why


def test_the_clean_candidate_after_all_of_them_is_as_complete_as_the_one_before(report):
    first, last = report.candidates[0], report.candidates[-1]

    assert last.verdict is first.verdict is Verdict.EXACT
    assert [delta.site for delta in last.sites] == [delta.site for delta in first.sites]
    assert report.exit_code == 3


def test_the_report_is_of_this_run(report):
    path = Path(report.environment["report"])

    assert len(json.loads(path.read_text())["candidates"]) == len(WAYS) + 1
    assert path.with_name("previous-report.json").read_text() == "of an earlier run"
