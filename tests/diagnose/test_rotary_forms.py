"""What is rotated, in which sense and in which arithmetic: planted by complex numbers, named by the formula of rotated queries."""

from __future__ import annotations

import pytest
import torch
from loose import SHORT, explained, loose
from torch import Tensor

HEADS, D, LENGTH, THETA = 4, 32, 48, 1e4
Q, K = (torch.randn(1, LENGTH, HEADS, D, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
FREQUENCIES = THETA ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)


def same(x: Tensor) -> Tensor:
    return x


def turned(x: Tensor, low=same, *, sense: float = 1.0) -> Tensor:
    """Halves of a head turned in float64, with the table rounded by `low`."""
    angle = (torch.arange(LENGTH, dtype=torch.float64)[:, None] * FREQUENCIES)[:, None]
    turn = torch.complex(low(angle.cos()), sense * low(angle.sin()))
    pairs = torch.complex(*(half.contiguous() for half in x.double().chunk(2, -1)))
    made = pairs * turn
    return torch.cat([made.real, made.imag], -1).float()


def exchanged(x: Tensor) -> Tensor:
    """Halves of a head turned with a table whose cosines and sines have changed places."""
    angle = (torch.arange(LENGTH, dtype=torch.float64)[:, None] * FREQUENCIES)[:, None]
    a, b = x.double().chunk(2, -1)
    return torch.cat([a * angle.sin() - b * angle.cos(), b * angle.sin() + a * angle.cos()], -1).float()


def with_signs(x: Tensor, of_b: float, of_a: float, cosines: float = 1.0) -> Tensor:
    """Halves of a head turned with these signs of the sines, and this factor on the cosines."""
    angle = (torch.arange(LENGTH, dtype=torch.float64)[:, None] * FREQUENCIES)[:, None]
    a, b = x.double().chunk(2, -1)
    cos, sin = cosines * angle.cos(), angle.sin()
    return torch.cat([a * cos + of_b * b * sin, b * cos + of_a * a * sin], -1).float()


def side(rot_q: Tensor, rot_k: Tensor):
    sites = {"q": Q, "k": K, "rot_q": rot_q, "rot_k": rot_k}
    return loose(sites, probes=SHORT[:1], rope__theta=THETA)


RIGHT = side(turned(Q), turned(K))


def test_a_right_rotation_is_not_accused():
    assert explained(side(turned(Q), turned(K)), RIGHT) == {}


@pytest.mark.parametrize(
    ("made", "knob", "value"),
    [
        (side(turned(Q), K), "rope.layers", "q only"),
        (side(Q, turned(K)), "rope.layers", "k only"),
        (side(turned(Q, sense=-1.0), turned(K, sense=-1.0)), "rope.direction", "inverse"),
        (side(exchanged(Q), exchanged(K)), "rope.direction", "cosines and sines exchanged"),
        (side(with_signs(Q, 1, 1), with_signs(K, 1, 1)), "rope.direction", "a minus sign on neither sine"),
        (side(with_signs(Q, -1, -1), with_signs(K, -1, -1)), "rope.direction", "a minus sign on both sines"),
        (side(with_signs(Q, 0, 0), with_signs(K, 0, 0)), "rope.direction", "without its sines"),
        (side(with_signs(Q, -1, 1, 0), with_signs(K, -1, 1, 0)), "rope.direction", "without its cosines"),
        (side(with_signs(Q, 0, 1), with_signs(K, 0, 1)), "rope.direction", "without the sine in the first of each pair"),
        (side(with_signs(Q, -1, 0), with_signs(K, -1, 0)), "rope.direction", "without the sine in the second of each pair"),
        *(
            (side(*(turned(x, lambda t, dtype=dtype: t.to(dtype).double()) for x in (Q, K))), "rope.dtype", f"{name} cos and sin")
            for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
        ),
    ],
)  # fmt: skip
def test_one_cause_is_one_finding(made, knob, value):
    found = explained(made, RIGHT)

    assert {name: finding.candidate_value for name, finding in found.items()} == {knob: value}
    assert "tied_with" not in found[knob].evidence, "what queries alone could have, keys have too"


def test_values_that_are_rotated_with_their_keys():
    v = torch.randn(1, LENGTH, HEADS, D, generator=torch.Generator().manual_seed(2))
    scores = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
    pattern = scores.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf).softmax(-1)

    def attended(values: Tensor):
        z = torch.einsum("bhqk,bkhd->bqhd", pattern.double(), values.double()).float()
        sites = {"q": Q, "k": K, "rot_q": turned(Q), "rot_k": turned(K), "v": v, "pattern": pattern, "z": z}
        return loose(sites, probes=SHORT[:1], rope__theta=THETA)

    found = explained(attended(turned(v)), attended(v))

    assert {name: finding.candidate_value for name, finding in found.items()} == {"rope.layers": "q, k and v"}
    assert explained(attended(v), attended(v)) == {}
