"""Whole comparisons of captures in memory."""

import math

import pytest
import torch
from held import Held, probe

from parity_audit.compare.deltas import compare, rmse_to_forced
from parity_audit.compare.floor import LARGEST, noise_ratio
from parity_audit.compare.verdict import first_divergence, judge_comparison
from parity_audit.core.errors import NotJudged
from parity_audit.core.jsonio import dumps
from parity_audit.core.report import Verdict

PROBE = probe()


def against_nothing(value, dtype="float32"):
    """A candidate with `value` at a site where judge and reference are 0, and equal logits."""
    zero, logits = torch.zeros(1, 4, 3), torch.arange(20.0).reshape(1, 4, 5).sin()
    candidate = Held(PROBE, {"blocks.0.attn_out": zero + value, "logits": logits})
    truth = Held(PROBE, {"blocks.0.attn_out": zero, "logits": logits})
    return compare(candidate, truth, truth, dtype=dtype)


def test_a_site_that_is_zero_on_both_sides_is_exact():
    comparison = against_nothing(0.0)

    assert judge_comparison(comparison)[0] is Verdict.EXACT
    assert [delta.noise_ratio for delta in comparison.sites] == [0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [1e-3, 1e30])
def test_a_value_where_there_should_be_none_is_a_finite_mismatch(value, dtype):
    comparison = against_nothing(value, dtype)
    site = comparison.sites[0]

    assert judge_comparison(comparison)[0] is Verdict.MISMATCH
    assert site.noise_ratio is not None
    assert 100 < site.noise_ratio <= LARGEST
    assert math.isfinite(site.rel)
    assert site.rel > 1
    assert dumps(comparison)


def test_a_score_that_one_side_masks_is_where_they_part():
    site, logits = "blocks.0.attn_scores", torch.ones(1, 4, 5)
    causal = torch.zeros(1, 2, 4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    ahead = causal.masked_fill(torch.ones(4, 4).triu(1).bool() & ~torch.ones(4, 4).triu(2).bool(), 0.0)
    truth = Held(PROBE, {site: causal, "logits": logits})
    comparison = compare(Held(PROBE, {site: ahead, "logits": logits}), truth, truth, dtype="float32")

    assert judge_comparison(comparison)[0] is Verdict.MISMATCH
    assert first_divergence(comparison).site == site
    assert rmse_to_forced(Held(PROBE, {site: ahead}), Held(PROBE, {site: causal}), PROBE, site)[0] == math.inf
    assert rmse_to_forced(truth, truth, PROBE, site)[0] == 0.0


def test_a_site_with_other_axes_is_an_error_that_names_it():
    shaped = {"logits": torch.ones(1, 4, 5)}
    truth = Held(PROBE, {"blocks.0.q": torch.ones(1, 4, 6), **shaped})
    with pytest.raises(NotJudged, match=r"blocks\.0\.q") as caught:
        compare(Held(PROBE, {"blocks.0.q": torch.ones(1, 4, 2, 3), **shaped}), truth, truth, dtype="float32")
    assert (caught.value.expected, caught.value.found) == ("(1, 4, 6)", "(1, 4, 2, 3)")


def test_the_smallest_number_of_a_dtype_is_rounding():
    """Half of the spacing below the smallest normal number is what rounding to nearest may leave."""
    spacing = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps

    assert noise_ratio(spacing / 2, 0.0, 0.0, "float32") <= 2.0


def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    against_nothing(0.0)

    assert torch.get_num_threads() == before


def test_with_a_definition_the_references_own_error_is_no_floor():
    """Reference and candidate both a hundred floors off, in different ways: against the judge alone that is parity."""
    draw = torch.Generator().manual_seed(0)
    exact = torch.randn(1, 4, 50, generator=draw, dtype=torch.float64)
    noise = [torch.randn(1, 4, 50, generator=draw, dtype=torch.float64) for _ in range(3)]
    judge = Held(PROBE, {"logits": exact})
    definition = Held(PROBE, {"logits": exact + 1e-6 * noise[0]})
    reference = Held(PROBE, {"logits": exact + 1e-4 * noise[1]})
    candidate = Held(PROBE, {"logits": exact + 1e-4 * noise[2]})

    fooled = compare(candidate, reference, judge, dtype="float32")
    found = compare(candidate, reference, judge, dtype="float32", definition=definition)
    same = compare(reference, reference, judge, dtype="float32", definition=definition)
    expected = (noise[2] - noise[1]).norm() / noise[0].norm() * 100

    assert judge_comparison(fooled)[0] is Verdict.PARITY
    assert judge_comparison(found)[0] is Verdict.MISMATCH
    assert found.logits is not None
    assert found.logits.noise_ratio == pytest.approx(float(expected), rel=1e-6)
    assert judge_comparison(same)[0] is Verdict.EXACT
