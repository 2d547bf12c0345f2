"""Several streams (AltUp), the residual of low rank (Laurel) and the statistical top-k, against numbers written by hand."""

import math

import pytest
import torch
from torch.distributions import Normal

from parity_audit.formulas import altup
from parity_audit.formulas.laurel import low_rank
from parity_audit.formulas.mlp import sparse

F64 = {"dtype": torch.float64}


def rms(x):
    return x.square().mean(-1).sqrt()


def test_streams_begin_as_projections_of_the_size_of_the_embedding():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), **F64)
    turned = torch.eye(4, **F64).roll(1, 0)

    made = altup.expanded(x, [3.0 * turned, 0.01 * turned], floor=1e-12)

    torch.testing.assert_close(made[..., 0, :], x)
    torch.testing.assert_close(made[..., 1, :], x.roll(1, -1))
    torch.testing.assert_close(made[..., 2, :], x.roll(1, -1))


@pytest.mark.parametrize(("floor", "size"), [(1e-2, 0.1), (None, 1.0)])
def test_a_small_projection_is_divided_by_the_floor_where_there_is_one(floor, size):
    x = torch.full((1, 1, 4), 1.0, **F64)
    made = altup.of_size(0.01 * x, x, floor)

    torch.testing.assert_close(rms(made), torch.full((1, 1), size, **F64))


def test_streams_are_combined_to_the_mean_of_what_has_the_size_of_the_first():
    streams = torch.tensor([[[[3.0, -3.0], [0.5, 0.5]]]], **F64)

    made = altup.combined(streams, [torch.eye(2, **F64)], floor=1e-5)

    torch.testing.assert_close(made, torch.tensor([[[3.0, 0.0]]], **F64))


def test_a_prediction_adds_a_mixture_of_all_streams():
    streams = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], **F64)
    modalities = torch.tensor([[[2.0, -1.0]]], **F64)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.0, 0.0]], **F64)  # rows: out 0 in 0, out 0 in 1, ...

    made = altup.predicted(streams, modalities, weight)

    # the coefficients are [[2, -1], [1, 0]]
    torch.testing.assert_close(made, torch.tensor([[[[3.0, -1.0], [1.0, 1.0]]]], **F64))


def test_a_correction_adds_each_streams_share_of_the_active_streams_error():
    streams = torch.tensor([[[[1.0, 1.0], [5.0, 7.0]]]], **F64)
    made = torch.tensor([[[2.0, 4.0]]], **F64)
    modalities = torch.tensor([[[1.0, 2.0]]], **F64)
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.5]], **F64)

    corrected = altup.corrected(streams, made, 0, modalities, weight, 1.0)

    torch.testing.assert_close(corrected[..., 0, :], made)  # a share of 1: what the block made takes its place
    torch.testing.assert_close(corrected[..., 1, :], torch.tensor([[[8.0, 16.0]]], **F64))


def test_weights_of_coefficients_are_clamped_where_there_is_a_limit():
    weight = torch.tensor([-2.0, 0.1, 3.0], **F64)

    assert altup.limited(weight, None) is weight
    assert altup.limited(weight, 0.5).tolist() == [-0.5, 0.1, 0.5]


def test_a_residual_of_low_rank_goes_through_its_rank():
    y = torch.tensor([[[1.0, 2.0, 3.0]]], **F64)
    left, right = torch.tensor([[1.0, 1.0, 0.0]], **F64), torch.tensor([[1.0], [0.0], [-2.0]], **F64)

    assert low_rank(y, left, right).tolist() == [[[3.0, 0.0, -6.0]]]


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_the_cut_leaves_the_share_of_a_normal_distribution_that_is_above_it(share):
    x = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(1), **F64)
    made = sparse(3.0 + 2.0 * x, share)

    above = (made > 0).double().mean().item()
    assert above == pytest.approx(1.0 - share, abs=4 * math.sqrt(share * (1 - share) / x.shape[-1]))
    cut = 3.0 + 2.0 * Normal(0.0, 1.0).icdf(torch.tensor(share, **F64)).item()
    assert (3.0 + 2.0 * x - made)[made > 0].mean().item() == pytest.approx(cut, abs=0.03)


def test_the_cut_of_two_numbers_is_their_mean_plus_their_spread():
    x = torch.tensor([1.0, 3.0], **F64)
    share = Normal(0.0, 1.0).cdf(torch.tensor(0.5, **F64)).item()

    torch.testing.assert_close(sparse(x, share), torch.tensor([0.0, 0.5], **F64))
    torch.testing.assert_close(sparse(x, share, correction=1), torch.tensor([0.0, 1.0 - math.sqrt(0.5)], **F64))
    assert sparse(x, None) is x
    with pytest.raises(ValueError, match="not between"):
        sparse(x, 1.0)
