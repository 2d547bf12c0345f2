"""What an engine's own kernels make of its distance to the reference, in audits of real models."""

from __future__ import annotations

from pathlib import Path

import pytest

import parity_audit
from parity_audit.core.report import Verdict
from parity_audit.report.terminal import render

pytestmark = pytest.mark.engine
PORT = Path(__file__).parents[1] / "ports" / "batch_faults.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    ports = [f"python:{PORT}:load,fault={fault}" for fault in ("single_rows_round", "stale_cache", "rows_leak")]
    return parity_audit.audit(
        "meta-llama/Llama-3.2-1B", candidates=["hf", *ports], miniature="mini", probes=["short", "decode", "batch"],
        repair=False, out=tmp_path_factory.mktemp("audit"), limits=False,
    )  # fmt: skip


def test_a_candidate_that_decodes_with_other_kernels_is_at_parity_and_all_of_it_is_explained(report):
    """The reference is the same program run at once: whole runs are bit-identical, so decoding is the whole distance."""
    own = report.candidates[0].own_variation

    assert report.candidates[0].verdict is Verdict.PARITY
    assert own.distance_at_once == 0.0
    assert own.explained == 1.0
    assert own.distance == own.rmse > 0.0
    assert 0.1 < own.noise_ratio < 4.0


def test_coarser_kernels_for_single_rows_are_no_mismatch(report):
    """Steps of one token are some three floors off in this port, and all of its distance is that."""
    rounds = report.candidates[1]

    assert rounds.verdict is Verdict.PARITY, rounds.why
    assert 1.5 < rounds.own_variation.noise_ratio < 4.0
    assert rounds.own_variation.explained == 1.0


def test_a_fault_of_the_cache_or_of_rows_is_not_excused(report):
    stale, leaks = report.candidates[2:]

    assert stale.verdict is leaks.verdict is Verdict.MISMATCH
    assert stale.own_variation.noise_ratio > 100.0


def test_the_report_says_how_much_it_explains(report):
    assert "explains 100% of the squared distance to the reference in decoding" in " ".join(render(report).split())
