"""Distances against closed forms."""

import math

import pytest
import torch

from parity_audit.compare.divergences import kl_per_position, top1_matches
from parity_audit.compare.floor import dtype_eps, guard, noise_ratio
from parity_audit.compare.moments import Moments


def test_kl_of_two_coins():
    p, q = 0.7, 0.4
    reference = torch.tensor([[math.log(p), math.log(1 - p)]])
    candidate = torch.tensor([[math.log(q), math.log(1 - q)]])

    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    assert kl_per_position(reference, candidate).item() == pytest.approx(expected, rel=1e-6)


def test_kl_of_nearly_equal_logits_does_not_cancel():
    """For logits that differ by small noise d, KL is half the variance of d under p."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 50_000, generator=generator, dtype=torch.float64)
    noise = 1e-6 * torch.randn(1, 50_000, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    variance = (p * noise.square()).sum() - (p * noise).sum().square()

    assert kl_per_position(logits, logits + noise).item() == pytest.approx(variance.item() / 2, rel=1e-3)


def test_kl_ignores_a_constant_shift():
    logits = torch.randn(3, 40, dtype=torch.float64)
    assert kl_per_position(logits, logits + 7).abs().max() < 1e-14


def test_top1():
    assert top1_matches(torch.eye(3), torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 0, 1]])) == 2


def test_ratio_is_the_quotient_of_errors():
    assert noise_ratio(8e-6, 2e-6, 1.0, "float32") == 4.0


def test_an_exact_reference_does_not_make_the_last_bit_infinite():
    rounded = guard(1.0, "float32")

    assert noise_ratio(rounded, 0.0, 1.0, "float32") == 1.0
    assert rounded == dtype_eps("float32") / 4


def test_guard_covers_plain_rounding():
    """Storing uniform values in float32 errs by less than the guard, and by no less than a third of it."""
    exact = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    error = (exact.float().double() - exact).square().mean().sqrt().item()
    rms = exact.square().mean().sqrt().item()

    assert guard(rms, "float32") / 3 < error < guard(rms, "float32")


def test_moments_against_whole_tensors():
    generator = torch.Generator().manual_seed(2)
    candidate, reference, judge = (torch.randn(2, 9, 5, generator=generator) for _ in range(3))
    keep = torch.ones(2, 9, 5, dtype=torch.bool)
    moments = Moments()
    for start in (0, 4, 8):
        part = slice(start, min(start + 4, 9))
        moments.add(candidate[:, part], reference[:, part], judge[:, part], keep[:, part], start)

    delta = candidate.double() - reference.double()

    assert moments.max_abs == pytest.approx(delta.abs().max().item())
    assert delta.abs()[moments.worst] == delta.abs().max()
    assert moments.rms(moments.square_sum) == pytest.approx(delta.square().mean().sqrt().item())


def test_padding_is_not_compared():
    candidate, reference = torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)
    candidate[:, 2] = 99.0
    keep = torch.tensor([[[True], [True], [False]]]).expand(1, 3, 2)
    moments = Moments()
    moments.add(candidate, reference, None, keep, 0)

    assert moments.max_abs == 0.0
    assert moments.count == 4


def test_nan_is_counted_and_one_sided_masks_are_noticed():
    candidate = torch.tensor([[[1.0, float("nan"), -float("inf"), -float("inf")]]])
    reference = torch.tensor([[[1.0, 2.0, -float("inf"), 0.5]]])
    moments = Moments()
    moments.add(candidate, reference, None, torch.ones(1, 1, 4, dtype=torch.bool), 0)

    assert moments.non_finite == 1
    assert moments.hidden_by_one_side == 1
    assert moments.count == 1
