"""How one rank's tensor is a part of the whole, and the whole that the ranks' parts make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ACTIVATION_AXIS = 2
"""Of `[batch, pos, ...]`: the axis that tensor parallelism cuts."""
HEADS = ("q", "rot_q", "z", "q_norm.out")
KV_HEADS = ("k", "v", "rot_k", "k_norm.out")
NEURONS = ("mlp.pre", "mlp.pre_linear", "mlp.post")


@dataclass(frozen=True)
class Cut:
    """A rank's tensor is pieces of these `sizes` along `axis`, one of each fused part; no sizes: all of it.

    `copies`: how many neighbouring ranks hold the same of each piece. `real` is how many entries of the only piece count
    (the rest is padding). `summand`: the whole is the sum over the ranks.
    """

    axis: int = ACTIVATION_AXIS
    sizes: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    real: int | None = None
    summand: bool = False


WHOLE = Cut()


def joined(parts: Sequence[Tensor], cuts: Sequence[Cut]) -> Tensor:
    """The whole of what the ranks hold, in order of rank."""
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


def by_width(shape: Sequence[int], site: str, sizes: dict[str, int], ranks: int) -> Cut | None:
    """How `[b, p, ...]` of this shape is a part of a site whose whole width the model's sizes give; None where it is no part.

    Raises nothing: a site of unknown width is taken to be whole on each rank.
    """
    whole, held = width_of(site, sizes), 1
    for size in shape[ACTIVATION_AXIS:]:
        held *= size
    if whole is None or held == whole:
        return WHOLE
    copies = max(1, ranks // sizes["n_kv_heads"]) if local(site) in KV_HEADS else 1
    if held * ranks != whole * copies:
        return None
    return Cut(sizes=(shape[ACTIVATION_AXIS],), copies=(copies,))


def width_of(site: str, sizes: dict[str, int]) -> int | None:
    """Numbers per token of the whole site, where tensor parallelism may cut it."""
    name = local(site)
    if name in HEADS:
        return sizes["n_heads"] * sizes["d_head"]
    if name in KV_HEADS:
        return sizes["n_kv_heads"] * sizes["d_head"]
    return sizes.get("d_mlp") if name in NEURONS else None


def local(site: str) -> str:
    """The name of a site inside its block."""
    return site.split(".", 2)[2] if site.startswith("blocks.") else site


def apart(parts: Sequence[Tensor], cut: Cut) -> list[float]:
    """For each rank the RMS of its difference to the first rank that should hold the same: 0 where none should."""
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


def held_by(owners: Tensor) -> tuple[tuple[int, int, int], ...]:
    """`(rank, start, stop)` of each run of entries that one rank holds, of a rank per entry."""
    spans: list[tuple[int, int, int]] = []
    for place, rank in enumerate(map(int, owners.tolist())):
        if spans and spans[-1][0] == rank:
            spans[-1] = (rank, spans[-1][1], place + 1)
        else:
            spans.append((rank, place, place + 1))
    return tuple(spans)
