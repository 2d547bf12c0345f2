"""What wrong sharding makes of a tensor, in closed form, and what is no fault of sharding."""

from __future__ import annotations

import pytest
import torch

from parity_audit.checks.sharding import Sharded, _values
from parity_audit.checks.sharding_forms import locally_normed, parts_moved, parts_wrong, rows_moved, tokens_moved
from parity_audit.checks.sharding_knobs import eps_of, scale_of
from parity_audit.core.shards import RankValue

TOLERANCE = 1e-6
SPANS = ((0, 0, 4), (1, 4, 8))


@pytest.fixture
def right() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8, dtype=torch.float64)


def test_tokens_in_another_order(right):
    assert tokens_moved(torch.cat([right[3:], right[:3]]), right, TOLERANCE) == "[0, 3) are [3, 6), [3, 6) are [0, 3)"
    assert tokens_moved(right, right, TOLERANCE) is None
    assert tokens_moved(right[[0, 0, 1, 2, 3, 4]], right, TOLERANCE) is None
    assert tokens_moved(right + 1, right, TOLERANCE) is None


def test_a_norm_over_the_channels_of_one_rank(right):
    weight = torch.rand(8, dtype=torch.float64) + 1
    normed = right / right.square().mean(1, keepdim=True).sqrt() * weight
    local = torch.cat([part / part.square().mean(1, keepdim=True).sqrt() for part in right.chunk(2, 1)], 1) * weight

    assert locally_normed(local, normed, 2, TOLERANCE)
    assert not locally_normed(2 * normed, normed, 2, TOLERANCE)
    assert not locally_normed(normed + 0.1, normed, 2, TOLERANCE)


def test_an_embedding_of_which_one_part_is_moved():
    torch.manual_seed(0)
    table, ids = torch.randn(8, 5, dtype=torch.float64), [0, 5, 6, 2, 7, 4]
    expected = table[ids]
    found = torch.stack([table[one - 1] if one > 4 else 0 * table[one] if one == 4 else table[one] for one in ids])

    assert rows_moved(found, table, ids, expected, SPANS, TOLERANCE) == (1, -1)
    assert rows_moved(3 * expected, table, ids, expected, SPANS, TOLERANCE) is None
    assert rows_moved(found, None, ids, expected, SPANS, TOLERANCE) is None


def test_parts_of_other_ranks_and_parts_that_are_wrong(right):
    exchanged = torch.cat([right[:, 4:], right[:, :4]], 1)
    one_wrong = torch.cat([right[:, :4], right[:, 4:] * 1.5], 1)

    assert parts_moved(exchanged, right, SPANS, 1, TOLERANCE) == [(0, 1), (1, 0)]
    assert parts_moved(one_wrong, right, SPANS, 1, TOLERANCE) == []
    assert parts_wrong(one_wrong, right, SPANS, 1, TOLERANCE) == [1]
    assert parts_wrong(right, right, SPANS, 1, TOLERANCE) == []


def test_the_rank_whose_live_value_is_not_the_specs():
    """`attention.scale` is read as one over what the module holds."""
    held = RankValue(knob="attention.scale", ranks=(0, 1), values=(0.13, 0.125))
    case = Sharded(
        capture=None, reference=None, values=(held, held), spec={"attention.scale": 8.0}, roles={},
        weight=lambda role, layer: None, dtype="float32",
    )  # fmt: skip

    findings = list(_values(case))

    assert [finding.knob for finding in findings] == ["attention.scale"]
    assert findings[0].evidence["ranks"] == [0]
    assert "0.13 on rank 0, 0.125 on rank 1" in findings[0].message


def test_the_eps_of_a_norm_on_one_rank():
    """y = x / sqrt(mean(x^2) + eps), with inputs of other sizes per token, so that no factor for all of them does."""
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64) * torch.tensor([0.03, 0.1, 0.3, 1.0, 3.0, 10.0])[:, None]
    right, wrong = (x / (x.square().mean(1, keepdim=True) + eps).sqrt() for eps in (1e-5, 3e-4))
    spec = {"norm.eps": 1e-5}

    assert eps_of(wrong, right, x, spec, TOLERANCE) == pytest.approx(3e-4)
    assert eps_of(1.1 * right, right, x, spec, TOLERANCE) is None
    assert eps_of(wrong + 0.01, right, x, spec, TOLERANCE) is None
    assert eps_of(wrong, right, x, {}, TOLERANCE) is None


def test_the_scale_of_the_heads_of_one_rank():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    seen = torch.ones(7, 7, dtype=torch.bool).tril()

    def attended(scale: float) -> torch.Tensor:
        products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / scale
        pattern = products.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", pattern, v.repeat_interleave(2, 1))

    found = torch.cat([attended(2.0)[:, :2], attended(2.3)[:, 2:]], 1)
    spec = {"attention.scale": 2.0, "attention.softcap": None}

    assert scale_of(found, q, k, v, slice(2, 4), spec, TOLERANCE) == pytest.approx(2.3)
    assert scale_of(found + 0.01, q, k, v, slice(2, 4), spec, TOLERANCE) is None
    assert scale_of(found, q, k, v, slice(2, 4), {**spec, "attention.softcap": 30.0}, TOLERANCE) is None
