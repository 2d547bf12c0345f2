"""The invariance report in every format: nothing lost, nothing executed."""

from __future__ import annotations

import pytest

from parity_audit.core.invariance_report import (
    AxisResult,
    CandidateInvariance,
    Completions,
    ConditionResult,
    Control,
    Divergent,
    Invariance,
    InvarianceReport,
    OperationClasses,
    SiteChange,
)
from parity_audit.core.jsonio import dumps, from_plain, to_plain
from parity_audit.core.types import NotTested
from parity_audit.report.invariance_content import WEAK, headline, invariance_content
from parity_audit.report.invariance_page import render
from parity_audit.report.terminal import printed

EVIL = "</title><script>alert(1)</script>[/bold]"


def made(verdict: Invariance = Invariance.BROKEN, *, fired: bool = True) -> InvarianceReport:
    """A report with one condition, whose names try to be markup."""
    change = SiteChange(site="returned", max_abs=0.5, ulp=12.5, ratio=77.0, position=3)
    condition = ConditionResult(axis="padding", name=EVIL, base="alone", verdict=verdict, changed=(change,), nats=0.25)
    axis = AxisResult(
        name="padding", question=EVIL, verdict=verdict, classes=((EVIL,),), words="{1} {>=4}", conditions=(condition,)
    )
    flips = tuple(
        Divergent(
            batch=5, row=2, position=7, token_id=11, alone_token_id=12, margin=margin, moved=0.5, tie=margin <= 1.0
        )
        for margin in (0.9, 1.1)
    )
    candidate = CandidateInvariance(
        backend=EVIL, package="transformers", version="5", settings={}, verdict=verdict, why=EVIL, axes=(axis,),
        operations=(
            OperationClasses(name=EVIL, kind="Linear", shape="4x4", varied="rows", words="{1} {>=2}", switches=(2,), ulp=1.5),
        ),
        first_operation=EVIL, first_site="blocks.0.q", control=Control(fired=fired, where="one condition"),
        completions=Completions(runs=4, tokens=8, unique=3, batches=(1, 5, 9, 3), divergent=flips),
        not_tested=(NotTested(what=EVIL, why=EVIL),),
    )  # fmt: skip
    return InvarianceReport(
        model=EVIL, weights={}, dtype="float32", device="cpu", subject={"tokens": 29, "largest_batch": 9}, reference="hf",
        candidates=(candidate,), exit_code=1,
    )  # fmt: skip


def test_the_terminal_says_all_of_it():
    text = printed(invariance_content(made(), where="/there/invariance.json"), width=160)

    for words in (
        "Broken",
        "77x",
        "12.5",
        "0.25",
        "{1} {>=4}",
        "fired",
        "3 unique of 4",
        "/there/invariance.json",
        EVIL,
    ):
        assert words in text
    assert text.count("a tie that rounding can turn") == 1
    assert text.count("a confident choice that flipped") == 1


def test_nothing_of_a_page_is_markup():
    page = render(made())

    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page


def test_a_control_that_did_not_fire_is_said():
    assert WEAK in printed(invariance_content(made(Invariance.BITWISE, fired=False)), width=200)
    assert WEAK not in printed(invariance_content(made(fired=True)), width=200)


@pytest.mark.parametrize(
    ("verdict", "word"),
    [
        (Invariance.BITWISE, "Bitwise"), (Invariance.CLASS_ONLY, "Within rounding"), (Invariance.NUMERIC, "Within rounding"),
        (Invariance.BROKEN, "Broken"), (Invariance.ERROR, "Nothing was judged"),
    ],
)  # fmt: skip
def test_the_headline_is_the_worst_verdict(verdict, word):
    assert headline(made(verdict)).startswith(word)


def test_the_report_survives_json():
    assert from_plain(InvarianceReport, to_plain(made())) == made()
    assert dumps(made())
