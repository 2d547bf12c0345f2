"""Divergences against closed forms, limits, published counter-examples and exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity_audit.compare import divergences as div

P, Q = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.9, 0.1], [0.2, 0.8]))
KL_PQ, KL_QP = 1.145725502931, 1.362737753989
JSD = {0.1: 0.100388361605, 0.5: 0.275396115249, 0.9: 0.113271294621}


def test_kl_both_ways():
    assert div.kl_divergence(P, Q).item() == pytest.approx(KL_PQ, abs=1e-9)
    assert div.kl_divergence(Q, P).item() == pytest.approx(KL_QP, abs=1e-9)


@pytest.mark.parametrize(("beta", "expected"), JSD.items())
def test_jsd_is_of_mixed_probabilities_with_the_teachers_weight(beta, expected):
    assert div.generalized_jsd(P, Q, beta).item() == pytest.approx(expected, abs=1e-9)
    assert div.generalized_jsd(Q, P, 1 - beta).item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("beta", "over_beta", "mirrored"),
    [(1e-2, 1.130544, 1.336061), (1e-4, 1.145572, 1.362466), (1e-6, 1.145724, 1.362735)],
)
def test_jsd_over_beta_tends_to_kl(beta, over_beta, mirrored):
    assert div.generalized_jsd(P, Q, beta).item() / beta == pytest.approx(over_beta, abs=1e-6)
    assert div.generalized_jsd(P, Q, 1 - beta).item() / beta == pytest.approx(mirrored, abs=2e-6)


def test_endpoints_are_the_limit_or_the_rescaled_limit():
    assert div.generalized_jsd(P, Q, 0.0).item() == div.generalized_jsd(P, Q, 1.0).item() == 0.0
    assert div.generalized_jsd(P, Q, 0.0, endpoints="kl").item() == pytest.approx(KL_PQ, abs=1e-9)
    assert div.generalized_jsd(P, Q, 1.0, endpoints="kl").item() == pytest.approx(KL_QP, abs=1e-9)


def test_jsd_refuses_other_weights():
    with pytest.raises(ValueError, match="beta"):
        div.generalized_jsd(P, Q, 1.5)


def test_disjoint_distributions():
    left, right = (torch.tensor([row], dtype=torch.float64) for row in ([0.0, -math.inf], [-math.inf, 0.0]))

    assert div.kl_divergence(left, right).item() == math.inf
    assert div.generalized_jsd(left, right, 0.5).item() == pytest.approx(math.log(2), abs=1e-12)
    assert div.total_variation(left, right).item() == div.hellinger(left, right).item() == 1.0
    assert div.chi_squared(left, right).item() == math.inf
    assert div.top_k_overlap(left, right, 1).item() == 0.0


@pytest.mark.parametrize("measure", [div.kl_divergence, div.total_variation, div.hellinger, div.chi_squared])
def test_identical_distributions_are_at_zero_with_excluded_tokens_too(measure):
    logits = torch.tensor([[1.0, -math.inf, 3.0], [-math.inf, 0.0, -math.inf]])
    assert measure(logits, logits).tolist() == [0.0, 0.0]


def test_a_token_that_only_p_excludes_adds_its_mass():
    """p = (1, 0), q = (1/2, 1/2): KL = log 2, chi squared = 1, TV = 1/2."""
    p, q = torch.tensor([[0.0, -math.inf]]), torch.zeros(1, 2)
    assert div.kl_divergence(p, q).item() == pytest.approx(math.log(2), abs=1e-12)
    assert div.chi_squared(p, q).item() == pytest.approx(1.0, abs=1e-12)
    assert div.total_variation(p, q).item() == pytest.approx(0.5, abs=1e-12)


def test_a_wide_vocabulary_does_not_cancel():
    """262,144 logits that differ by noise of 1e-6: KL is half the noise's variance, about 5e-13."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 262_144, generator=generator, dtype=torch.float64)
    noise = 1e-6 * torch.randn(2, 262_144, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    half_variance = ((p * noise.square()).sum(-1) - (p * noise).sum(-1).square()) / 2

    found = div.kl_divergence(logits, logits + noise)

    assert torch.allclose(found, half_variance, rtol=1e-3)
    assert torch.allclose(div.generalized_jsd(logits, logits + noise, 0.5), found / 4, rtol=1e-3)


def test_extreme_log_ratios_neither_overflow_nor_vanish():
    """p = (1 - e^-700, e^-700) against uniform: KL(u || p) = 350 - log 2."""
    p, u = torch.tensor([[0.0, -700.0]]).double(), torch.zeros(1, 2).double()
    assert div.kl_divergence(u, p).item() == pytest.approx(350 - math.log(2), rel=1e-12)
    assert div.kl_divergence(p, u).item() == pytest.approx(math.log(2), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-800, 800), st.floats(-800, 800)), min_size=2, max_size=6), st.floats(0.001, 0.999))
def test_nothing_is_negative_and_jsd_is_below_its_bound(pairs, beta):
    p, q = (torch.tensor([[pair[side] for pair in pairs]], dtype=torch.float64) for side in (0, 1))
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)

    assert div.kl_divergence(p, q).item() >= 0.0
    assert 0.0 <= div.generalized_jsd(p, q, beta).item() <= entropy + 1e-9


def test_rank_biased_overlap_of_equal_and_of_swapped_rankings():
    """Rankings (a, b, c) and (b, a, c): overlaps 0, 2, 3 of depths 1, 2, 3; exact arithmetic with persistence 9/10."""
    p, q = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[2.0, 3.0, 1.0]])
    share = Fraction(9, 10)
    expected = share**3 + (1 - share) / share * (0 * share + 1 * share**2 + 1 * share**3)

    assert div.rank_biased_overlap(p, p).item() == pytest.approx(1.0, abs=1e-12)
    assert div.rank_biased_overlap(p, q).item() == pytest.approx(float(expected), abs=1e-12)


def test_top_k_overlap_counts_members_whatever_their_order():
    p, q = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[3.0, 4.0, 1.0, 2.0]])
    assert [div.top_k_overlap(p, q, k).item() for k in (1, 2, 3)] == [0.0, 1.0, pytest.approx(2 / 3)]


@pytest.mark.parametrize("seed", range(20))
def test_a_rest_that_is_rounding_is_no_mass(seed):
    """Either side's rest may come out as 0 or as 1e-16: both mean that nothing is left."""
    generator = torch.Generator().manual_seed(seed)
    log_p, log_q = (torch.randn(50, 40, generator=generator).double().log_softmax(-1) for _ in range(2))

    assert torch.allclose(div.kl_lower_bound(log_p, log_q), div.kl_divergence(log_p, log_q), rtol=1e-6)


def test_the_bound_from_top_tokens_is_below_the_divergence_and_exact_for_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = (torch.randn(5, 40, generator=generator).double().log_softmax(-1) for _ in range(2))
    whole = div.kl_divergence(log_p, log_q)

    assert bool((div.kl_lower_bound(log_p[:, :10], log_q[:, :10]) < whole).all())
    assert torch.allclose(div.kl_lower_bound(log_p, log_q), whole, rtol=1e-6)


def test_top_probabilities_above_one_are_refused():
    with pytest.raises(ValueError, match="add up to"):
        div.kl_lower_bound(torch.zeros(1, 2), torch.zeros(1, 2))


def test_a_constant_shift_is_told_from_a_change():
    shift, rest = div.logit_shift(torch.tensor([[1.0, 2.0]]), torch.tensor([[8.0, 9.5]]))
    assert (shift.item(), rest.item()) == (7.25, 0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_no_logits_are_refused(bad):
    with pytest.raises(ValueError, match="NaN"):
        div.kl_divergence(torch.tensor([[0.0, bad]]), torch.zeros(1, 2))


def test_a_row_without_any_token_is_refused():
    with pytest.raises(ValueError, match="every token"):
        div.kl_divergence(torch.full((1, 2), -math.inf), torch.zeros(1, 2))


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        div.kl_divergence(torch.zeros(1, 2), torch.zeros(1, 3))


def test_chunks_of_rows_change_nothing(monkeypatch):
    logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(9, 32)
    whole = div.generalized_jsd(*logits, 0.3)
    monkeypatch.setattr(div, "CHUNK_ENTRIES", 64)

    assert torch.equal(div.generalized_jsd(*logits, 0.3), whole)


def test_low_precision_inputs_are_widened_first():
    """Two bfloat16 rows: the divergence of the numbers they hold, not of a bfloat16 computation."""
    p, q = (torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    assert torch.equal(div.kl_divergence(p, q), div.kl_divergence(p.double(), q.double()))
