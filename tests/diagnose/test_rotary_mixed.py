"""One convention's pairs with the other's angles: planted with a closed form, and no honest rotation is called that."""

from __future__ import annotations

import pytest
import torch
from loose import loose, told
from tiny_port import probe

PAIRING = "rope.pairing"

HEADS, KV, WIDTH = 4, 2, 32
PROBES = (probe("short", (48,)), probe("left", (40, 23, 9), pad="left", seed=3))


def rotated(x, positions, joined, angles):
    turn = positions[..., None] * 10000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    whole = turn.repeat(1, 1, 2) if angles == "half" else turn.repeat_interleave(2, -1)
    a, b = x.chunk(2, -1) if joined == "half" else (x[..., 0::2], x[..., 1::2])
    r = torch.cat([-b, a], -1) if joined == "half" else torch.stack([-b, a], -1).flatten(-2)
    return x * whole.cos()[:, :, None] + r * whole.sin()[:, :, None]


def side(joined, angles):
    sites = {}
    for seed, item in enumerate(PROBES):
        positions = (torch.tensor(item.mask).cumsum(1) - 1).clamp_min(0)
        for name, heads in (("q", HEADS), ("k", KV)):
            x = torch.randn(*item.shape, heads, WIDTH, generator=torch.Generator().manual_seed(seed))
            sites |= {(item.name, name): x, (item.name, f"rot_{name}"): rotated(x, positions, joined, angles)}
    return loose(sites, probes=PROBES, rope__theta=10000.0, rope__pairing="half", rope__scaling=None)


@pytest.mark.parametrize(("joined", "angles"), [("half", "adjacent"), ("adjacent", "half")])
def test_pairs_of_one_convention_with_angles_of_the_other(joined, angles):
    findings = told(side(joined, angles), side("half", "half"))

    assert findings[PAIRING].candidate_value == f"{joined} pairs, turned by the angles of {angles} ones"
    assert findings[PAIRING].reference_value == "half"


@pytest.mark.parametrize("pairing", ["half", "adjacent"])
def test_a_rotation_is_a_rotation(pairing):
    findings = told(side(pairing, pairing), side("half", "half"))

    assert findings.keys() == ({PAIRING} if pairing == "adjacent" else set())
    assert not findings or findings[PAIRING].candidate_value == "adjacent"
