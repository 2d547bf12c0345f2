"""Learned positions: rows of a table, found again from what is added to the embedding."""

from __future__ import annotations

import pytest
import torch
from loose import loose, told
from tiny_port import probe

WIDTH, ROWS = 64, 80
TABLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)) / 10
PROBES = (probe("short", (48,)), probe("ragged", (40, 23, 9), seed=2))
PADDED = probe("left_padded", (20, 11), seed=4, pad="left")


def positions(of, from_padding=False):
    mask = torch.tensor(of.mask, dtype=torch.long)
    return torch.arange(mask.shape[1]).expand(mask.shape) if from_padding else (mask.cumsum(1) - 1).clamp(min=0)


def side(offset=0, scale=1.0, *, added_times=1.0, padded=False, from_padding=False, hidden=False, rows=None):
    probes = (*PROBES, PADDED) if padded else PROBES
    outside, inside = {}, {}
    for of in probes:
        chosen = positions(of, from_padding) + offset if rows is None else rows(positions(of))
        added = scale * TABLE[chosen]
        embed = torch.randn(*added.shape, generator=torch.Generator().manual_seed(5))
        inside[of.name, "resid_pre"] = embed + added_times * added
        outside |= {(of.name, "embed"): embed} | ({} if hidden else {(of.name, "pos_embed"): added})
    weights = {"pos_embed": TABLE}
    return loose(outside, weights=weights, probes=probes, layer=None) | loose(inside, weights=weights, probes=probes)


def found(candidate, reference=None):
    return {knob: item.candidate_value for knob, item in told(candidate, reference or side()).items()}


def test_the_same_rows_are_no_finding():
    assert found(side()) == {}
    assert found(side(hidden=True)) == {}


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("offset", [1, 2, 17])
def test_an_offset_is_the_number_of_rows(offset, hidden):
    assert found(side(offset, hidden=hidden)) == {"pos_embed.offset": offset}


@pytest.mark.parametrize("scale", [0.5, 1.001, 3.0])
def test_a_factor_is_fitted(scale):
    assert found(side(scale=scale)) == {"pos_embed.scale": pytest.approx(scale, rel=1e-5)}


@pytest.mark.parametrize("factor", [0.0, -1.0, 0.9])
def test_positions_that_are_there_and_not_added_are_told_from_smaller_ones(factor):
    assert found(side(added_times=factor)) == {"residual.pos_embed": pytest.approx(factor, abs=1e-6)}


def test_positions_counted_from_the_padding_are_that():
    assert found(side(padded=True, from_padding=True), side(padded=True)) == {
        "pos_embed.offset": "counted from the padding"
    }


def test_another_order_is_said_token_by_token():
    own = {f"token {place}": place * 7 % ROWS for place in range(1, 48) if place * 7 % ROWS != place}

    assert found(side(rows=lambda p: (p * 7) % ROWS)) == {"pos_embed.offset": own}
