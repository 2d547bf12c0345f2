"""Describe which part of a whole tensor each rank holds, and join the ranks' parts into the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ACTIVATION_AXIS = 2
"""The axis of an activation `[batch, pos, ...]` that tensor parallelism cuts."""
HEADS = ("q", "rot_q", "z", "q_norm.out")
KV_HEADS = ("k", "v", "rot_k", "k_norm.out")
NEURONS = ("mlp.pre", "mlp.pre_linear", "mlp.post")


@dataclass(frozen=True)
class Shard:
    """How the tensor of one rank is a part of the whole tensor.

    The rank's tensor consists of pieces of these `sizes` along `axis`, one piece of each fused part; without `sizes` it
    is the whole tensor. `copies` gives, for each piece, how many neighbouring ranks hold the same values (1 each if
    empty). `real`, for a tensor of one piece, is the number of entries that are not padding. If `summand` is true, the
    whole is the sum over the ranks.
    """

    axis: int = ACTIVATION_AXIS
    sizes: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    real: int | None = None
    summand: bool = False


WHOLE = Shard()


def join_shards(parts: Sequence[Tensor], cuts: Sequence[Shard]) -> Tensor:
    """Return the whole tensor that the ranks' `parts`, in order of rank, make together."""
    cut = cuts[0]
    if cut.summand:
        return torch.stack(tuple(parts)).sum(0)
    if not cut.sizes:
        return parts[0]
    if cut.real is not None:
        own = zip(parts, cuts, strict=True)
        return torch.cat([part.narrow(cut.axis, 0, each.real or 0) for part, each in own], cut.axis)
    pieces = [part.split(list(cut.sizes), cut.axis) for part in parts]
    copies = cut.copies or (1,) * len(cut.sizes)
    whole = [torch.cat([of[number] for of in pieces[:: copies[number]]], cut.axis) for number in range(len(cut.sizes))]
    return torch.cat(whole, cut.axis)


def by_width(shape: Sequence[int], site: str, sizes: dict[str, int], ranks: int) -> Shard | None:
    """Return how an activation of this shape `[b, p, ...]` is a part of its site, None if the shape fits no part of it.

    The width of the whole site comes from the model's `sizes`. A site of unknown width counts as whole on each rank.
    """
    whole, held = width_of(site, sizes), 1
    for size in shape[ACTIVATION_AXIS:]:
        held *= size
    if whole is None or held == whole:
        return WHOLE
    copies = max(1, ranks // sizes["n_kv_heads"]) if local(site) in KV_HEADS else 1
    if held * ranks != whole * copies:
        return None
    return Shard(sizes=(shape[ACTIVATION_AXIS],), copies=(copies,))


def width_of(site: str, sizes: dict[str, int]) -> int | None:
    """Return the numbers per token of the whole site, None for a site that tensor parallelism does not cut."""
    name = local(site)
    if name in HEADS:
        return sizes["n_heads"] * sizes["d_head"]
    if name in KV_HEADS:
        return sizes["n_kv_heads"] * sizes["d_head"]
    return sizes.get("d_mlp") if name in NEURONS else None


def local(site: str) -> str:
    """Return the name of a site inside its block, or the full name of a site outside the blocks."""
    return site.split(".", 2)[2] if site.startswith("blocks.") else site


def copy_differences(parts: Sequence[Tensor], cut: Shard) -> list[float]:
    """Return, for each rank, the RMS difference between its tensor and that of the first rank that should hold the same.

    It is 0 for the first of such ranks, and for ranks whose values no other rank should hold.
    """
    out = []
    copies = (len(parts),) if not cut.sizes else cut.copies or (1,) * len(cut.sizes)
    for rank, part in enumerate(parts):
        if cut.summand:
            out.append(0.0)
            continue
        pieces = part.split(list(cut.sizes), cut.axis) if cut.sizes else (part,)
        squares, count = 0.0, 0
        for number, piece in enumerate(pieces):
            first = parts[rank - rank % copies[number]]
            other = first.split(list(cut.sizes), cut.axis)[number] if cut.sizes else first
            squares += float((piece.double() - other.double()).square().sum())
            count += piece.numel()
        out.append((squares / max(count, 1)) ** 0.5)
    return out


def rank_spans(owners: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Return `(rank, start, stop)` for each run of consecutive entries of one rank; `owners` has one rank per entry."""
    spans: list[tuple[int, int, int]] = []
    for place, rank in enumerate(map(int, owners.tolist())):
        if spans and spans[-1][0] == rank:
            spans[-1] = (rank, spans[-1][1], place + 1)
        else:
            spans.append((rank, place, place + 1))
    return tuple(spans)
