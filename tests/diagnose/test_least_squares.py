"""The fitter against closed forms: a known curve, known noise, and data that say nothing."""

import torch
from torch import Tensor

from parity_audit.diagnose.identify.least_squares import gauss_newton, ratio


def _exponential(x: Tensor, y: Tensor):
    def model(theta: Tensor):
        value = theta[0] * torch.exp(theta[1] * x)
        yield value - y, torch.stack([value / theta[0], value * x], -1)

    return model


def test_recovers_a_curve_exactly():
    x = torch.linspace(0, 1, 60, dtype=torch.float64).reshape(10, 6)

    fit = gauss_newton(_exponential(x, 2.5 * torch.exp(-1.3 * x)), torch.tensor([1.0, 0.0], dtype=torch.float64))

    torch.testing.assert_close(fit.value, torch.tensor([2.5, -1.3], dtype=torch.float64), rtol=1e-10, atol=0)


def test_standard_errors_are_those_of_repeated_experiments():
    x = torch.linspace(0, 1, 200, dtype=torch.float64).reshape(50, 4)
    g = torch.Generator().manual_seed(0)
    noise = [1e-3 * torch.randn(50, 4, generator=g, dtype=torch.float64) for _ in range(200)]

    truth, start = 2.5 * torch.exp(-1.3 * x), torch.tensor([2.0, -1.0], dtype=torch.float64)
    runs = [gauss_newton(_exponential(x, truth + n), start) for n in noise]
    seen = torch.stack([run.value for run in runs]).std(0)
    claimed = torch.stack([run.stderr for run in runs]).mean(0)

    assert torch.all((claimed / seen - 1).abs() < 0.25)


def test_errors_shared_inside_a_cluster_widen_the_standard_error():
    g = torch.Generator().manual_seed(1)
    x = torch.rand(40, 30, generator=g, dtype=torch.float64) + 1
    shared = torch.randn(40, 1, generator=g, dtype=torch.float64).expand(40, 30)
    alone = torch.randn(40, 30, generator=g, dtype=torch.float64)

    assert ratio(x, 2 * x + shared).stderr > 3 * ratio(x, 2 * x + alone).stderr


def test_a_parameter_that_moves_nothing_gives_no_estimate():
    zeros = torch.zeros(4, 3, dtype=torch.float64)

    assert gauss_newton(lambda theta: [(zeros, torch.zeros(4, 3, 2).double())], torch.ones(2).double()) is None
