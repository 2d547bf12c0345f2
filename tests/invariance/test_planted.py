"""Ports with a known dependence on the conditions of their run: the verdict, and the condition that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.invariance_report import Invariance

pytestmark = pytest.mark.engine
PORT = Path(__file__).parents[1] / "ports" / "batch_faults.py"
FAULTS = {
    "clean": set(),
    "left_padding_is_attended_to": {"padding"},
    "rows_leak": {"batch, prefill", "batch, decode", "position in the batch", "neighbours", "padding"},
    "stale_cache": {"cached decode", "chunked prefill"},
    "chunk_starts_early": {"chunked prefill"},
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return parity_audit.invariance(
        "meta-llama/Llama-3.2-1B", candidates=[f"python:{PORT}:load,fault={fault}" for fault in FAULTS],
        miniature="mini", quick=True, max_batch=5, completions=2, new_tokens=2, out=tmp_path_factory.mktemp("invariance"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_fault(report):
    return dict(zip(FAULTS, report.candidates, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_exactly_the_conditions_that_meet_the_fault_are_broken(by_fault, fault):
    axes = (*by_fault[fault].axes, *by_fault[fault].run_to_run)

    assert {axis.name for axis in axes if axis.verdict is Invariance.BROKEN} == FAULTS[fault]


def test_only_padding_on_the_left_meets_a_mask_of_the_right(by_fault):
    (padding,) = (axis for axis in by_fault["left_padding_is_attended_to"].axes if axis.name == "padding")

    assert {one.name: one.verdict for one in padding.conditions} == {
        "right by 1": Invariance.BITWISE, "right by 16": Invariance.BITWISE,
        "left by 1": Invariance.BROKEN, "left by 16": Invariance.BROKEN,
    }  # fmt: skip


def test_a_tail_of_one_token_does_not_meet_a_fault_of_chunks(by_fault):
    (chunks,) = (axis for axis in by_fault["chunk_starts_early"].axes if axis.name == "chunked prefill")
    broken = {one.name for one in chunks.conditions if one.verdict is Invariance.BROKEN}

    assert broken == {one.name for one in chunks.conditions} - {"28"}


def test_a_broken_port_decides_the_exit_code_and_the_clean_one_is_within_rounding(report, by_fault):
    assert report.exit_code == 1
    assert by_fault["clean"].verdict in (Invariance.BITWISE, Invariance.CLASS_ONLY, Invariance.NUMERIC)
    assert [one.verdict for fault, one in by_fault.items() if fault != "clean"] == [Invariance.BROKEN] * 4


def test_a_leak_of_a_thousandth_is_far_above_the_floor(by_fault):
    ratios = [change.ratio for axis in by_fault["rows_leak"].axes for one in axis.conditions for change in one.changed]
    clean = [change.ratio for axis in by_fault["clean"].axes for one in axis.conditions for change in one.changed]

    assert max(ratio for ratio in ratios if ratio is not None) > 1000
    assert all(ratio < 16 for ratio in clean if ratio is not None)
