"""Errors that look like rounding, and errors that do not."""

import pytest
import torch

from parity_audit.diagnose.identify.rounding import like_rounding, rounded

FORMULA = torch.randn(60, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_rounding_is_known_by_its_size(name, dtype):
    assert like_rounding(rounded(FORMULA, dtype), FORMULA) == name


def test_one_rounding_per_token_is_rounding():
    scale = rounded(torch.rand(60, 1, dtype=torch.float64) + 0.5, torch.bfloat16)
    exact = torch.rand(60, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.5
    assert like_rounding(FORMULA * rounded(exact, torch.bfloat16) / exact, FORMULA) == "bfloat16"
    assert like_rounding(FORMULA * scale, FORMULA) is None


@pytest.mark.parametrize("size", [1e-4, 3e-4, 2e-3])
def test_an_error_that_points_one_way_is_not(size):
    """A wrong eps makes every value a little too large, by less where the input is larger."""
    share = size * (0.5 + torch.rand(60, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(6)))
    assert like_rounding(FORMULA * (1 + share), FORMULA) is None


def test_float32_is_full():
    assert like_rounding(FORMULA.float().double(), FORMULA) is None


def test_a_few_values_that_a_bias_nearly_cancels_are_no_narrow_dtype():
    generator = torch.Generator().manual_seed(2)
    value, bias = torch.randn(4096, generator=generator).double(), 5.0
    value[:40] *= 1e-4
    stored = (value + bias).float().double() - bias

    assert like_rounding(stored, value) is None
