"""Which rank does not hold its own part of a checkpoint tensor, and what it has in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parity_audit.backends.prints import canonical
from parity_audit.backends.shards import Cut, apart, joined
from parity_audit.core.shards import OTHER_PLACES, OTHER_VALUES, OWN, PART_OF_RANK, RankTensor
from parity_audit.core.types import WeightTap

SAME = 1e-5
"""Relative; layout transforms and the engine's packing round at most once or twice in float32."""
SAME_COARSE = 1e-2
"""Relative, for values that a 16-bit dtype holds."""


def rank_tensor(
    tap: WeightTap, ranks: Sequence[int], parts: Sequence[Tensor], cuts: Sequence[Cut], stored: Mapping[str, Tensor]
) -> RankTensor | None:
    """What each rank holds of a tensor, None where all hold their own part.

    `stored` are the checkpoint's tensors that are fused into the same parameter, by name.
    """
    expected = stored.get(tap.name)
    whole = canonical(joined(parts, cuts), tap)
    if expected is None or expected.shape != whole.shape:
        return None
    close = SAME if parts[0].dtype == torch.float32 else SAME_COARSE
    copies = apart(parts, cuts[0])
    if _same(whole, expected, close) and not any(copies):
        return None
    if not cuts[0].sizes:
        alone = [_same(canonical(part, tap), expected, close) for part in parts]
        return RankTensor(name=tap.name, ranks=tuple(ranks), holds=tuple(OWN if one else OTHER_VALUES for one in alone))
    numbers = [torch.full(part.shape, float(rank)) for rank, part in zip(ranks, parts, strict=True)]
    owner = canonical(joined(numbers, cuts), WeightTap(
        name=tap.name, path=tap.path, slice=tap.slice, layout=tap.layout, part=tap.part, relayout=tap.relayout, sizes=tap.sizes,
    ))  # fmt: skip
    held = tuple(_holds(rank, owner, whole, expected, stored, close) for rank in ranks)
    return RankTensor(name=tap.name, ranks=tuple(ranks), holds=held)


def _holds(
    rank: int, owner: Tensor, whole: Tensor, expected: Tensor, stored: Mapping[str, Tensor], close: float
) -> str:
    own = whole[owner == rank]
    if _same(own, expected[owner == rank], close):
        return OWN
    for other in owner.unique().int().tolist():
        theirs = expected[owner == other]
        if other != rank and theirs.shape == own.shape and _same(own, theirs, close):
            return PART_OF_RANK.format(other)
    return OTHER_PLACES if any(_from(*side, rank, stored) for side in _sides(owner, whole)) else OTHER_VALUES


def _sides(owner: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """A matrix by its rows and by its columns: a layer is cut along one of them."""
    return [(owner, whole, False), (owner.T, whole.T, True)] if whole.ndim == 2 else []


def _from(owner: Tensor, whole: Tensor, turned: bool, rank: int, stored: Mapping[str, Tensor]) -> bool:
    """Whether a rank has whole rows, and every one of them is one of the fused tensors'."""
    rows = whole[(owner == rank).all(1)]
    matrices = (tensor.T if turned else tensor for tensor in stored.values() if tensor.ndim > 1)
    known = {row.contiguous().numpy().tobytes() for matrix in matrices for row in matrix} if len(rows) else set()
    return bool(known) and all(row.contiguous().numpy().tobytes() in known for row in rows)


def _same(a: Tensor, b: Tensor, close: float) -> bool:
    size = float(b.double().square().mean().sqrt()) if b.numel() else 0.0
    return bool((a.double() - b.double()).abs().max() <= close * max(size, 1e-30)) if a.numel() else True
