"""Rotations that are mixed up, planted with a closed form: pairs of one convention with the angles of the other, layers of one kind
taken for those of another."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from loose import loose, told
from tiny_port import probe

from parity_audit.diagnose.evidence import Evidence
from parity_audit.specs.schema import ResolvedKnob

PAIRING = "rope.pairing"

HEADS, KV, WIDTH = 4, 2, 32
PROBES = (probe("short", (48,)), probe("left", (40, 23, 9), pad="left", seed=3))


def rotated(x, positions, joined, angles, theta=10000.0):
    turn = positions[..., None] * theta ** -(torch.arange(0, WIDTH, 2) / WIDTH)
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


KINDS = {
    "rope.theta": ResolvedKnob(value=500000.0, layers=(0,)),
    "rope.scaling": ResolvedKnob(value={"rope_type": "linear", "factor": 3.0}, layers=(0,)),
    "attention.temperature_by_position": ResolvedKnob(value={"scale": 0.1, "step": 16}, layers=(1,)),
}


def layers_of(kinds: tuple[str, str]) -> dict[int | None, Evidence]:
    """Two layers, each "rotates" (at a third of the positions) or "grows" (queries times what grows with the position)."""
    made: dict[int | None, Evidence] = {}
    for layer, kind in enumerate(kinds):
        sites = {}
        for seed, item in enumerate(PROBES):
            positions = (torch.tensor(item.mask).cumsum(1) - 1).clamp_min(0)
            growth = 1 + 0.1 * torch.log1p(((positions + 1) / 16).floor())[..., None, None]
            for name, heads in (("q", HEADS), ("k", KV)):
                x = torch.randn(
                    *item.shape, heads, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
                )
                turned = rotated(x, positions / 3, "half", "half", 500000.0)
                grown = x * growth if name == "q" else x
                sites |= {(item.name, name): x, (item.name, f"rot_{name}"): turned if kind == "rotates" else grown}
        own = loose({at: x.float() for at, x in sites.items()}, probes=PROBES, layer=layer)[layer]
        made[layer] = dataclasses.replace(own, dims={**own.dims, "n_layers": 2}, knobs=KINDS)
    return made


def test_a_layer_that_is_taken_for_one_of_another_kind_has_all_values_of_that_kind():
    findings = told(layers_of(("rotates", "rotates")), layers_of(("rotates", "grows")))

    assert findings.keys() == KINDS.keys()
    assert {finding.layers for finding in findings.values()} == {(1,)}
    assert findings["rope.theta"].candidate_value == 500000.0
    assert findings["rope.scaling"].candidate_value == {"rope_type": "linear", "factor": 3.0}
    assert findings["attention.temperature_by_position"].candidate_value is None


def test_layers_of_two_kinds_that_are_right_are_not_accused():
    assert told(layers_of(("rotates", "grows")), layers_of(("rotates", "grows"))) == {}
