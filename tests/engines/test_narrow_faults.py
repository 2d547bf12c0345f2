"""Ports that are wrong behind their hooks, or for few inputs only: each found, and said in the words of its cause."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PORTS = Path(__file__).parents[1] / "ports" / "wrong_in_one_place.py"
PROBES = ("short", "ids", "batch", "one", "two", "again")
SAID = {
    "clipped": "the hook shows the reference's logits, the model returns others: clipped to -0.3 ... 0.3",
    "first_position": "the model returned [1, 1, 515] where the reference has [1, 48, 515] (probe short)",
    "token_zero": "only at the token id 0",
    "last_ids": "only at the token id",
    "leaking": "only in batches of",
    "single": "only in texts of 1 token",
    "remembering": "the model remembers what it ran before",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    names = ("clean", *SAID)
    report = parity_audit.audit(
        "meta-llama/Llama-3.2-1B", candidates=[f"python:{PORTS}:{name}" for name in names], miniature="mini",
        probes=PROBES, repair=False, out=tmp_path_factory.mktemp("narrow") / "out", limits=False,
    )  # fmt: skip
    return dict(zip(names, report.candidates, strict=True))


def test_a_clean_port_is_exact_and_says_beyond_which_length_nothing_is_known(found):
    assert found["clean"].verdict is Verdict.EXACT
    assert found["clean"].findings == ()
    assert "texts longer than 48 tokens" in {gap.what for gap in found["clean"].not_tested}


@pytest.mark.parametrize("name", SAID)
def test_it_is_found_and_said(found, name):
    assert found[name].verdict is Verdict.MISMATCH
    assert any(SAID[name] in finding.message for finding in found[name].findings)
