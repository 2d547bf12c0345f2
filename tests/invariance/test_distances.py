"""Distances with a closed form: units in the last place, floors, nats, bits."""

from __future__ import annotations

import math

import pytest
import torch

from parity_audit.invariance import distances
from parity_audit.invariance.distances import Floor


@pytest.mark.parametrize(
    ("value", "dtype", "unit"),
    [
        (1.0, "float32", 2.0**-23), (1.999, "float32", 2.0**-23), (2.0, "float32", 2.0**-22), (1.0, "bfloat16", 2.0**-7),
        (0.75, "float16", 2.0**-11), (1e-42, "float32", 2.0**-149), (0.0, "float32", 2.0**-149),
    ],
)  # fmt: skip
def test_the_unit_in_the_last_place(value, dtype, unit):
    top = torch.tensor([value], dtype=torch.float64).clamp_min(torch.finfo(torch.float64).tiny)

    assert distances.spacing(top, dtype).item() == unit


def test_the_unit_is_the_step_to_the_next_number():
    values = torch.rand(100, generator=torch.Generator().manual_seed(0)) * 8 + 0.01
    step = torch.nextafter(values, torch.tensor(torch.inf)) - values

    assert torch.equal(distances.spacing(values.double(), "float32").float(), step)


def test_a_change_of_one_bit_of_the_largest_number_is_one_ulp():
    base = torch.tensor([[1.5, 0.25], [3.0, -1.0], [0.5, 0.1]])
    seen = base.clone()
    seen[1, 0] = torch.nextafter(seen[1, 0], torch.tensor(9.0))
    floor = Floor(rmse=(1e-9, 1e-9, 1e-9), judge_rms=(1.0, 2.0, 0.4))

    found = distances.change("blocks.0.resid_post", seen.double(), base.double(), 0, floor, "float32")

    assert found.ulp == 1.0
    assert found.max_abs == 2.0**-22
    assert found.position == 1
    assert found.ratio == pytest.approx(2.0**-22 / math.sqrt(2) / (0.25 * 2.0**-23 * 2.0))


def test_the_floor_of_a_position_is_at_least_the_median():
    floor = Floor(rmse=(1e-3, 1e-6, 1e-2), judge_rms=(1.0, 1.0, 1.0))

    assert floor.ratio(1, 1e-3, "float32") == pytest.approx(1.0)
    assert floor.ratio(2, 1e-3, "float32") == pytest.approx(0.1)


def test_floors_are_root_mean_squares_of_each_position():
    judge = torch.ones(2, 3, 4, dtype=torch.float64)
    native = judge.clone()
    native[1] += 0.5

    assert distances.floors({"z": native, "only": native}, {"z": judge}) == {
        "z": Floor(rmse=(0.0, 0.5), judge_rms=(1.0, 1.0))
    }


def test_nats_are_of_log_probabilities_and_blind_to_a_constant():
    logits = torch.tensor([[0.0, math.log(3.0)]])

    assert distances.nats(logits, logits + 7.0) == pytest.approx(0.0, abs=1e-6)
    assert distances.nats(logits, torch.zeros(1, 2)) == pytest.approx(math.log(2.0), abs=1e-6)


def test_bits_are_of_the_compared_positions_and_tell_zeros_apart():
    one, other = torch.zeros(3, 2), torch.zeros(3, 2)
    other[0, 0] = 5.0

    assert distances.bits({"z": one}, 1) == distances.bits({"z": other}, 1)
    assert distances.bits({"z": one}) != distances.bits({"z": other})
    assert distances.bits({"z": one}) != distances.bits({"z": -one})
