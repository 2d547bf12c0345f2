"""The soft-cap curve: derivatives against finite differences, fits against values drawn at random."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity_audit.diagnose.identify.attention.saturation import cap_fit, cap_of, curve, fit_curve


@pytest.mark.parametrize("w", [0.0, 1e-9, 1e-4, 0.01, 0.3])
def test_derivatives(w: float):
    x, h = torch.linspace(-8, 8, 41, dtype=torch.float64), 1e-6
    _, slope, bend = curve(x, w)
    step = max(w, 1e-3) * 1e-4

    torch.testing.assert_close(slope, (curve(x + h, w)[0] - curve(x - h, w)[0]) / (2 * h), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(bend, (curve(x, w + step)[0] - curve(x, w)[0]) / step, rtol=2e-2, atol=1e-3)


def test_series_and_closed_form_meet():
    w = 1e-3
    x = torch.tensor([0.999, 1.001], dtype=torch.float64)

    value, slope, _ = curve(x, w)
    torch.testing.assert_close(value, torch.tanh(x * w**0.5) / w**0.5, rtol=1e-11, atol=0)
    torch.testing.assert_close(slope, 1 - torch.tanh(x * w**0.5) ** 2, rtol=1e-11, atol=0)


def _pairs(scale: float, cap: float | None, spread: float):
    y = spread * scale * torch.randn(12, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    s = y / scale if cap is None else cap * torch.tanh(y / scale / cap)
    return [(y, s.float().double(), torch.ones_like(y, dtype=torch.bool))]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(scale=st.floats(0.5, 60), cap=st.floats(5, 120), bend=st.floats(0.15, 2.0))
def test_scale_and_cap_to_four_digits(scale: float, cap: float, bend: float):
    fit = fit_curve(_pairs(scale, cap, bend * cap))

    assert 1 / float(fit.value[0]) == pytest.approx(scale, rel=1e-4)
    assert cap_of(float(fit.value[1]), float(fit.stderr[1]))[0] == pytest.approx(cap, rel=1e-3)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(scale=st.floats(0.5, 60), spread=st.floats(0.5, 30))
def test_no_cap_is_none_and_not_a_large_number(scale: float, spread: float):
    fit = fit_curve(_pairs(scale, None, spread))

    assert cap_of(float(fit.value[1]), float(fit.stderr[1])) == (None, None)
    assert 1 / float(fit.value[0]) == pytest.approx(scale, rel=1e-6)


def test_values_too_small_for_the_spec_cap_say_so():
    fit = fit_curve(_pairs(8.0, None, 1e-3))

    answer = cap_fit("attention.softcap", 0, fit, residual=0.0, site="attn_scores", spec_cap=50.0)

    assert isinstance(answer, str)
    assert "too small to show a cap of 50" in answer
    assert math.isfinite(float(answer.split("below ")[1].split(" ")[0]))


def test_a_cap_that_leaves_hardly_less_than_none_is_no_cap():
    """Something else is wrong with these values: a cap takes a part of it, many standard errors from none."""
    y = 3 * torch.randn(400, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    bent = 20 * torch.tanh(y / 20) + 0.02 * y.abs()
    fit = fit_curve([(y, bent, torch.ones_like(y, dtype=torch.bool))])

    assert cap_of(float(fit.value[1]), float(fit.stderr[1]))[0] is not None
    answer = cap_fit("attention.softcap", 0, fit, residual=0.0, site="attn_scores", spec_cap=None)
    assert isinstance(answer, str)
    assert "of what none leaves" in answer


def test_nothing_to_fit():
    zero = torch.zeros(2, 2, dtype=torch.float64)

    assert fit_curve([(zero, zero, torch.ones(2, 2, dtype=torch.bool))]) is None
