"""Whole comparisons of captures in memory."""

import math

import pytest
import torch
from held import Held, probe

from parity_audit.compare.deltas import compare, rmse_to_forced
from parity_audit.compare.floor import LARGEST, noise_ratio
from parity_audit.compare.outputs import BY_HOOKS_ALONE
from parity_audit.compare.verdict import first_divergence, judge_comparison
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


class HeldByProbe(Held):
    """Tensors of one site by probe."""

    def __init__(self, probes, site, tensors):
        self.probes, self.site, self.by_probe, self.assumed = probes, site, tensors, ()

    def sites(self, probe):
        return {self.site}

    def shape(self, probe, site):
        return tuple(self.by_probe[probe].shape)

    def rows(self, probe, site, start, stop):
        return self.by_probe[probe][:, start:stop]


def with_a_probe_of(tokens, error):
    """A probe of 48 tokens on which both sides err by 1e-6, and one of fewer on which the reference does by chance by 1e-7 only."""
    probes = [probe(length=48), probe("few", length=tokens)]
    errors = {"short": (1e-6, 1e-6), "few": (error, 1e-7)}
    truth = {item.name: values((1, item.shape[1], 64)).double() for item in probes}
    drawn = torch.Generator().manual_seed(1)

    def side(number):
        return {
            name: value * (1 + errors[name][number] * torch.randn(value.shape, generator=drawn, dtype=torch.float64))
            for name, value in truth.items()
        }

    candidate, reference, judge = (
        HeldByProbe(probes, "blocks.0.resid_post", held) for held in (side(0), side(1), truth)
    )
    return compare(candidate, reference, judge, dtype="float64")


@pytest.mark.parametrize("tokens", [1, 2, 4, 7])
def test_the_floor_of_a_few_tokens_is_not_taken_from_them_alone(tokens):
    comparison = with_a_probe_of(tokens, 1e-6)
    ratios = {delta.probe: delta.noise_ratio for delta in comparison.by_probe}

    assert not any(map(comparison.is_beyond, comparison.by_probe))
    assert ratios["few"] == pytest.approx(1.0, rel=0.5)
    assert ratios["short"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("tokens", "error"), [(8, 1e-6), (24, 1e-6), (1, 1e-4), (2, 1e-4)])
def test_what_is_no_rounding_is_beyond_on_a_few_tokens_as_on_many(tokens, error):
    comparison = with_a_probe_of(tokens, error)

    assert [delta.probe for delta in comparison.by_probe if comparison.is_beyond(delta)] == ["few"]


def values(size):
    """Numbers that depend on the shape alone."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def shapes(**candidate):
    """A candidate with tensors of these shapes beside the truth's; tensors of one shape are equal."""
    sizes = {"blocks.0.q": (1, 4, 6), "logits": (1, 4, 5), "returned": (1, 4, 5)}
    truth = Held(PROBE, {name: values(size) for name, size in sizes.items()})
    own = {name: values(candidate.get(name.rpartition(".")[2], size)) for name, size in sizes.items()}
    return compare(Held(PROBE, own), truth, truth, dtype="float32")


@pytest.mark.parametrize("shape", [(1, 4, 2, 3), (1, 4, 5), (1, 4, 7), (1, 3, 6), (2, 4, 6)])
def test_a_site_of_another_shape_is_a_gap_of_that_site_alone(shape):
    comparison = shapes(q=shape)
    gap = next(gap for gap in comparison.not_tested if gap.what == "short/blocks.0.q")

    assert {delta.site for delta in comparison.sites} == {"logits", "returned"}
    assert gap.why == f"blocks.0.q is {list(shape)} where the reference has [1, 4, 6] (probe short)"
    assert judge_comparison(comparison)[0] is Verdict.EXACT


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 3, 5), (4, 5), (1, 4, 4), (3, 4, 5)])
@pytest.mark.parametrize("hook_too", [False, True])
def test_a_returned_value_of_another_shape_is_a_mismatch(shape, hook_too):
    comparison = shapes(returned=shape, **({"logits": shape} if hook_too else {}))
    verdict, why = judge_comparison(comparison)

    assert verdict is Verdict.MISMATCH
    assert why.startswith(f"the model returned {list(shape)} where the reference has [1, 4, 5] (probe short)")


def test_a_hook_of_another_shape_gives_way_to_what_is_returned():
    comparison = shapes(logits=(1, 1, 5))

    assert judge_comparison(comparison)[0] is Verdict.EXACT
    assert any(gap.what == "short/logits" for gap in comparison.not_tested)


@pytest.mark.parametrize(("padding", "verdict"), [(-1e4, Verdict.EXACT), (0.0, Verdict.MISMATCH)])
def test_padded_columns_of_the_vocabulary_are_named_and_may_get_no_probability(padding, verdict):
    logits = values((1, 4, 5))
    wide = torch.cat([logits, torch.full((1, 4, 3), padding)], -1)
    truth = Held(PROBE, {"logits": logits, "returned": logits})
    comparison = compare(Held(PROBE, {"logits": wide, "returned": wide}), truth, truth, dtype="float32")

    assert judge_comparison(comparison)[0] is verdict
    assert comparison.logits.max_abs == 0.0
    named = any(gap.what == "columns 5 to 7 of logits" for gap in comparison.not_tested)
    assert named == (verdict is Verdict.EXACT)


def test_positions_that_a_port_does_not_reach_are_cut_on_every_side_and_only_those():
    """A port that ran 3 of 4 positions has them compared; one that ran 4 and shows 3 has another shape."""
    draw = torch.randn(1, 4, 5)
    truth = Held(PROBE, {"logits": draw, "returned": draw})
    short = {"logits": draw[:, :3], "returned": draw[:, :3]}
    reached = compare(Held(probe(length=3), short), truth, truth, dtype="float32")
    lost = compare(Held(PROBE, short), truth, truth, dtype="float32")

    assert judge_comparison(reached)[0] is Verdict.EXACT
    assert judge_comparison(lost)[0] is Verdict.MISMATCH


def test_the_returned_value_decides_and_not_the_hook():
    right = torch.randn(1, 4, 5)
    truth = Held(PROBE, {"logits": right, "returned": right})
    judge = Held(PROBE, {"logits": right + 1e-7, "returned": right + 1e-7})
    hook_lies = compare(Held(PROBE, {"logits": 2 * right, "returned": right}), truth, judge, dtype="float32")
    returns_other = compare(Held(PROBE, {"logits": right, "returned": 2 * right}), truth, judge, dtype="float32")

    assert judge_comparison(hook_lies)[0] is Verdict.PARITY
    assert hook_lies.logits.max_abs == 0.0
    assert judge_comparison(returns_other)[0] is Verdict.MISMATCH
    assert returns_other.logits.max_abs == pytest.approx(float(right.abs().max()))
    assert first_divergence(returns_other).site == "returned"


def test_a_capture_of_hooks_alone_says_so():
    truth = Held(PROBE, {"logits": values((1, 4, 5))})

    assert BY_HOOKS_ALONE in compare(truth, truth, truth, dtype="float32").not_tested


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


@pytest.mark.parametrize(
    ("bad", "verdict"),
    [(math.nan, Verdict.INCONCLUSIVE), (math.inf, Verdict.INCONCLUSIVE), (-math.inf, Verdict.MISMATCH)],
)
def test_logits_that_are_not_finite_in_one_column_are_no_crash(bad, verdict):
    """-inf excludes a token, which is a difference; the others are no logits."""
    logits = torch.arange(20.0).reshape(1, 4, 5).sin()
    broken = logits.clone()
    broken[0, 2, 3] = bad
    truth = Held(PROBE, {"logits": logits})
    comparison = compare(Held(PROBE, {"logits": broken}), truth, truth, dtype="float32")

    assert judge_comparison(comparison)[0] is verdict
    assert dumps(comparison)
