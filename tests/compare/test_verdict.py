"""The verdict: never a pass by default."""

import dataclasses

import pytest
import torch
from held import Held, probe

from parity_audit.compare.deltas import Comparison, compare
from parity_audit.compare.variation import Variation
from parity_audit.compare.verdict import agreement_outside, first_divergence, judge_comparison
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


@pytest.mark.parametrize(
    ("stream", "returned", "says"), [(1.0, 1.0, True), (4.1, 1.0, False), (1.0, 4.1, False), (None, 1.0, False)]
)
def test_a_mismatch_inside_blocks_says_that_the_outside_agrees(stream, returned, says):
    inside, outside = delta("blocks.0.q", ratio=1e6), (delta("blocks.0.resid_mid", ratio=stream), delta(ratio=returned))
    words = agreement_outside(comparison(inside, *outside))

    assert words == ("what it returns and its residual stream agree in every probe of this run" if says else "")
    assert agreement_outside(comparison(inside, delta())) == "", "no stream was compared"


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(1.0, Verdict.INCONCLUSIVE), (4.1, Verdict.MISMATCH), (None, Verdict.INCONCLUSIVE)]
)
def test_an_error_that_the_candidate_raised_is_no_parity_and_hides_no_mismatch(ratio, verdict):
    said = judge_comparison(comparison(delta(ratio=ratio), broke_off=("decoding: IndexError",)))

    assert said[0] is verdict
    assert ("decoding: IndexError; elsewhere at most 1x" in said[1]) == (ratio == 1.0)


@pytest.mark.parametrize(("ours", "theirs", "told"), [(True, False, True), (True, True, False), (False, True, False)])
def test_an_error_counts_where_the_reference_ran_the_probe(ours, theirs, told):
    def side(fails):
        held = Held(probe(length=3), {} if fails else {"logits": torch.ones(1, 3, 5)})
        held.raised = lambda name: f"{name}: IndexError" if fails else ""
        return held

    found = compare(side(ours), side(theirs), None, dtype="float32")

    assert found.broke_off == (("short: IndexError",) if told else ())


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


@pytest.mark.parametrize(
    ("own", "ratio", "verdict"),
    [
        (0.0, 4.1, Verdict.MISMATCH), (1.5, 4.1, Verdict.PARITY), (1.5, 7.1, Verdict.PARITY), (1.5, 7.3, Verdict.MISMATCH),
        (3.9, 5.0, Verdict.PARITY), (4.1, 4.2, Verdict.MISMATCH), (400.0, 400.0, Verdict.MISMATCH),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", ["decoded", "batched"])
def test_kernels_that_the_candidate_changes_itself_widen_the_limit_of_such_runs(own, ratio, verdict, shape):
    """By sqrt(1 + v^2), and by nothing where its own runs are further apart than rounding."""
    runs = {"decoded": ("odd",)} if shape == "decoded" else {"batches": ("odd",)}
    made = comparison(delta(), delta(ratio=ratio, probe="odd"), variation=Variation(**{shape: {"logits": own}}), **runs)

    assert judge_comparison(made)[0] is verdict
    assert (first_divergence(made) is None) is (verdict is Verdict.PARITY)


def test_the_candidates_own_kernels_excuse_no_run_of_another_shape():
    own = Variation(decoded={"logits": 3.0}, batched={"logits": 3.0})
    odd = delta(ratio=5.0, probe="odd")

    assert judge_comparison(comparison(odd, variation=own))[0] is Verdict.MISMATCH
    assert judge_comparison(comparison(odd, variation=own, decoded=("odd",)))[0] is Verdict.PARITY
    assert (
        judge_comparison(comparison(odd, variation=Variation(decoded={"logits": 3.0}), batches=("odd",)))[0]
        is Verdict.MISMATCH
    )


def test_a_lesser_delta_of_another_probe_is_not_excused_with_the_worst_one():
    worst, plain = delta(ratio=6.0, probe="odd"), delta(ratio=4.5)
    made = comparison(worst, plain, decoded=("odd",), variation=Variation(decoded={"logits": 3.0}))

    assert judge_comparison(made)[0] is Verdict.MISMATCH
    assert first_divergence(made).probe == "short"
