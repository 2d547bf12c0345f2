"""The verdict: never a pass by default."""

import dataclasses

import pytest

from parity_audit.compare.deltas import Comparison
from parity_audit.compare.verdict import first_divergence, judge_comparison
from parity_audit.core.report import LogitsDelta, SiteDelta, Verdict


def delta(site="logits", ratio=1.0, max_abs=1e-6, probe="short"):
    return SiteDelta(site=site, layer=None, probe=probe, max_abs=max_abs, rmse=max_abs, rel=max_abs, noise_ratio=ratio)


LOGITS = LogitsDelta(max_abs=1e-6, mean_abs=1e-7, rmse=1e-7, rel=1e-7, noise_ratio=1.0, kl=0.0, top1_agreement=1.0)


def comparison(*deltas, logits=LOGITS, **more):
    return Comparison(sites=deltas, by_probe=deltas, logits=logits, **more)


def test_parity_needs_every_site_within_the_floor():
    assert judge_comparison(comparison(delta("embed"), delta(ratio=3.9)))[0] is Verdict.PARITY
    assert judge_comparison(comparison(delta("embed"), delta(ratio=4.1)))[0] is Verdict.MISMATCH


def test_inside_a_block_kernels_may_round_more():
    inner = "blocks.0.z"
    assert judge_comparison(comparison(delta(inner, ratio=15.0), delta()))[0] is Verdict.PARITY
    assert judge_comparison(comparison(delta(inner, ratio=17.0), delta()))[0] is Verdict.MISMATCH


def test_exact_is_bit_identical_everywhere():
    assert judge_comparison(comparison(delta(max_abs=0.0)))[0] is Verdict.EXACT


@pytest.mark.parametrize(
    ("whole", "step", "verdict"),
    [(0.0, 3.9, Verdict.PARITY), (0.0, 4.1, Verdict.MISMATCH), (1e-6, 3.9, Verdict.PARITY)],
)
def test_exact_is_about_decoded_tokens_too(whole, step, verdict):
    deltas = delta(ratio=1.0, max_abs=whole), delta(ratio=step, probe="decode")
    assert judge_comparison(comparison(*deltas, decoded=("decode",)))[0] is verdict


def test_the_words_say_which_part_is_bit_identical():
    whole, step = delta(max_abs=0.0), delta(ratio=1.1, probe="decode")
    said = judge_comparison(comparison(whole, step, decoded=("decode",)))[1]
    assert said == "bit-identical in whole runs; cached decoding at parity, 1.1x (at logits)"
    assert "bit-identical" not in judge_comparison(comparison(delta(), step, decoded=("decode",)))[1]
    assert "bit-identical" not in judge_comparison(comparison(step, decoded=("decode",)))[1]


@pytest.mark.parametrize("ratio", [17.0, 1e30, None])
def test_what_rests_on_an_assumption_decides_nothing(ratio):
    query, assumed = delta("blocks.0.rot_q", ratio=ratio), {("short", "blocks.0.rot_q"): "queries are an operand"}

    assert judge_comparison(comparison(query, delta()))[0] in (Verdict.MISMATCH, Verdict.INCONCLUSIVE)
    assert judge_comparison(comparison(query, delta(), assumed=assumed))[0] is Verdict.PARITY
    assert judge_comparison(comparison(query, assumed=assumed))[0] is Verdict.INCONCLUSIVE
    assert judge_comparison(comparison(query, delta(max_abs=0.0), assumed=assumed))[0] is Verdict.EXACT


@pytest.mark.parametrize(
    "broken",
    [
        comparison(),
        comparison(delta(), logits=None),
        comparison(delta(ratio=None)),
        comparison(delta(), non_finite=("short/embed: 1 NaN",)),
    ],
)
def test_gaps_are_inconclusive(broken):
    assert judge_comparison(broken)[0] is Verdict.INCONCLUSIVE


def test_a_different_mask_is_a_mismatch_whatever_the_numbers_say():
    assert judge_comparison(comparison(delta(), mask_mismatch=("short/blocks.0.attn_scores",)))[0] is Verdict.MISMATCH


def test_first_divergence_follows_the_data():
    sites = [delta("embed"), delta("blocks.0.z", ratio=19.0), delta("logits", ratio=99.0)]
    first = first_divergence(comparison(*[dataclasses.replace(item) for item in sites]))

    assert first is not None
    assert first.site == "blocks.0.z"
