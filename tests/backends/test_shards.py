"""Parts of ranks against wholes that are known: every way in which a tensor is cut."""

from __future__ import annotations

import pytest
import torch

from parity_audit.backends.hf_ranks import require_whole_heads
from parity_audit.backends.rank_tensors import rank_tensor
from parity_audit.backends.shards import WHOLE, Shard, by_width, copy_differences, join_shards, rank_spans
from parity_audit.core.types import WeightTap

SIZES = {"n_heads": 4, "n_kv_heads": 2, "d_head": 3, "d_mlp": 10, "d_model": 7}


def fused(ranks: int, kv_heads: int = 2):
    """Queries, keys and values of a fused layer `[b p out]`, as each rank holds them."""
    q, k, v = torch.arange(12.0), 100 + torch.arange(3.0 * kv_heads), 200 + torch.arange(3.0 * kv_heads)
    copies = max(1, ranks // kv_heads)
    parts = [
        torch.cat([q.chunk(ranks)[rank], *(one.chunk(ranks // copies)[rank // copies] for one in (k, v))])
        for rank in range(ranks)
    ]
    cut = Shard(sizes=(12 // ranks, *(3 * kv_heads * copies // ranks,) * 2), copies=(1, copies, copies))
    return torch.cat([q, k, v])[None, None], [part[None, None] for part in parts], cut


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_parts_are_joined_part_by_part_and_copies_of_heads_once(ranks):
    whole, parts, cut = fused(ranks)

    assert torch.equal(join_shards(parts, [cut] * ranks), whole)
    assert copy_differences(parts, cut) == [0.0] * ranks


def test_a_copy_of_a_head_that_differs_is_seen():
    _, parts, cut = fused(4)
    parts[3][..., -1] += 2

    differs = copy_differences(parts, cut)

    assert differs[:3] == [0.0] * 3
    assert differs[3] == pytest.approx((4 / 9) ** 0.5)


def test_summands_are_added_and_whole_copies_taken_once():
    parts = [torch.full((1, 2, 3), float(rank)) for rank in (1, 2)]

    assert torch.equal(join_shards(parts, [Shard(summand=True)] * 2), torch.full((1, 2, 3), 3.0))
    assert torch.equal(join_shards(parts, [WHOLE] * 2), parts[0])
    assert copy_differences(parts, WHOLE) == [0.0, 1.0]
    assert copy_differences(parts, Shard(summand=True)) == [0.0, 0.0]


def test_padding_of_a_vocabulary_is_dropped_in_every_part():
    whole = torch.arange(10.0).view(5, 2)
    parts = [whole[:4], torch.cat([whole[4:], torch.full((3, 2), 9.0)])]
    cuts = [Shard(axis=0, sizes=(4,), real=4), Shard(axis=0, sizes=(4,), real=1)]

    assert torch.equal(join_shards(parts, cuts), whole)


@pytest.mark.parametrize(
    ("site", "shape", "cut"),
    [
        ("blocks.0.q", (1, 5, 2, 3), Shard(sizes=(2,), copies=(1,))),
        ("blocks.0.q", (1, 5, 12), WHOLE),
        ("blocks.0.rot_k", (1, 5, 3), Shard(sizes=(3,), copies=(1,))),
        ("blocks.0.mlp.post", (1, 5, 5), Shard(sizes=(5,), copies=(1,))),
        ("blocks.0.resid_post", (1, 5, 7), WHOLE),
        ("blocks.0.z", (1, 5, 5), None),
    ],
)
def test_width_says_how_a_site_is_cut(site, shape, cut):
    assert by_width(shape, site, SIZES, ranks=2) == cut


def test_heads_that_several_ranks_hold_are_copies():
    assert by_width((1, 5, 1, 3), "blocks.0.k", SIZES, ranks=4) == Shard(sizes=(1,), copies=(2,))


def test_spans_are_runs_of_one_rank():
    assert rank_spans(torch.tensor([0, 0, 1, 1, 1])) == ((0, 0, 2), (1, 2, 5))


def said(parts, cut, stored, name="q", **where):
    return rank_tensor(WeightTap(name=name, path="qkv", **where), [0, 1], parts, [cut] * 2, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_rank_holds_in_the_place_of_its_part(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(4, 3), torch.randn(4, 3)
    cut, stored = Shard(axis=0, sizes=(2, 2), copies=(1, 1)), {"q": q, "k": k}
    right = [torch.cat([q[:2], k[:2]]).to(dtype), torch.cat([q[2:], k[2:]]).to(dtype)]
    exchanged = [right[0], torch.cat([q[:2], k[2:]]).to(dtype)]
    by_block = list(torch.cat([q, k]).to(dtype).chunk(2))
    other = [right[0], right[1] + 1]

    assert said(right, cut, stored, slice=(0, 4)) is None
    assert said(exchanged, cut, stored, slice=(0, 4)).holds == ("own", "part of rank 0")
    assert said(by_block, cut, stored, slice=(0, 4)).holds == ("own", "rows of other places")
    assert said(other, cut, stored, slice=(0, 4)).holds == ("own", "other values")


def test_columns_of_another_place_and_copies_that_differ():
    torch.manual_seed(0)
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    cut, stored = Shard(axis=1, sizes=(2,)), {"q": first, "k": second}

    assert said([first[:, :2], second[:, 2:]], cut, stored).holds == ("own", "rows of other places")
    assert said([first, first + 1], WHOLE, stored).holds == ("own", "other values")


def test_transformers_is_not_asked_to_cut_through_a_head():
    plan = {"model.layers.*.self_attn.k_proj": "colwise"}
    with pytest.raises(ValueError, match=r"cannot cut 6 key-value heads over 4 ranks; tp=3 divides them"):
        require_whole_heads(plan, {"n_kv_heads": 6}, 4)
    for fits, heads in ((plan, 8), ({"model.layers.*.mlp.up_proj": "colwise"}, 6)):
        require_whole_heads(fits, {"n_kv_heads": heads}, 4)
