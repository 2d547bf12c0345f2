"""The golden-section search beside functions whose lowest point is known."""

import math

import pytest

from parity_audit.compare.golden import lowest


@pytest.mark.parametrize("at", [-2.9, 0.0, math.pi / 2])
def test_the_lowest_point_of_one_valley(at):
    """A parabola is flat within the root of a rounding of its lowest point, a kink is not."""
    assert lowest(lambda x: (x - at) ** 2, -3.0, 3.0) == pytest.approx(at, abs=1e-7)
    assert lowest(lambda x: abs(x - at), -3.0, 3.0) == pytest.approx(at, abs=1e-12)


def test_an_end_that_is_lowest():
    assert lowest(math.exp, -1.0, 4.0) == pytest.approx(-1.0, abs=1e-12)
