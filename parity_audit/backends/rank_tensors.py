"""Find the ranks that do not hold their own part of a checkpoint tensor, and say what each of them holds instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parity_audit.backends.shards import Shard, copy_differences, join_shards
from parity_audit.backends.weight_fingerprints import canonical
from parity_audit.core.shards import OTHER_PLACES, OTHER_VALUES, OWN, PART_OF_RANK, RankTensor
from parity_audit.core.types import WeightTap

SAME = 1e-5
"""Largest difference, relative to the RMS of the expected values, at which float32 values count as equal.

Layout transforms and the engine's packing of weights round at most once or twice in float32.
"""
SAME_COARSE = 1e-2
"""The same limit for values in any other dtype than float32, in practice a 16-bit one."""


def rank_tensor(
    tap: WeightTap, ranks: Sequence[int], parts: Sequence[Tensor], cuts: Sequence[Shard], stored: Mapping[str, Tensor]
) -> RankTensor | None:
    """Return what each rank holds in place of its part of a checkpoint tensor.

    Returns None if the joined parts equal the checkpoint's tensor and copies of one part are identical. Returns None as
    well if nothing can be compared, because `stored` lacks the tensor or has it in another shape.

    Args:
        tap: where the engine keeps the tensor, and how to bring it back to the checkpoint's layout.
        ranks: numbers of the ranks that hold a part.
        parts: the tensor that each of these ranks holds.
        cuts: how each of `parts` is a part of the whole tensor.
        stored: the checkpoint's tensors that are fused into the same parameter, by name.
    """
    expected = stored.get(tap.name)
    whole = canonical(join_shards(parts, cuts), tap)
    if expected is None or expected.shape != whole.shape:
        return None
    close = SAME if parts[0].dtype == torch.float32 else SAME_COARSE
    copies = copy_differences(parts, cuts[0])
    if _same(whole, expected, close) and not any(copies):
        return None
    if not cuts[0].sizes:
        alone = [_same(canonical(part, tap), expected, close) for part in parts]
        return RankTensor(name=tap.name, ranks=tuple(ranks), holds=tuple(OWN if one else OTHER_VALUES for one in alone))
    numbers = [torch.full(part.shape, float(rank)) for rank, part in zip(ranks, parts, strict=True)]
    owner = canonical(join_shards(numbers, cuts), WeightTap(
        name=tap.name, path=tap.path, slice=tap.slice, layout=tap.layout, part=tap.part, relayout=tap.relayout, sizes=tap.sizes,
    ))  # fmt: skip
    held = tuple(_holds(rank, owner, whole, expected, stored, close) for rank in ranks)
    return RankTensor(name=tap.name, ranks=tuple(ranks), holds=held)


def _holds(
    rank: int, owner: Tensor, whole: Tensor, expected: Tensor, stored: Mapping[str, Tensor], close: float
) -> str:
    """Return what `rank` holds: its own part, that of another rank, rows from elsewhere in `stored`, or other values.

    `owner` has the shape of `whole` and names, for each entry, the rank that it came from.
    """
    own = whole[owner == rank]
    if _same(own, expected[owner == rank], close):
        return OWN
    for other in owner.unique().int().tolist():
        theirs = expected[owner == other]
        if other != rank and theirs.shape == own.shape and _same(own, theirs, close):
            return PART_OF_RANK.format(other)
    return OTHER_PLACES if any(_from(*side, rank, stored) for side in _sides(owner, whole)) else OTHER_VALUES


def _sides(owner: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return a matrix as it is and transposed, since a layer is cut along its rows or along its columns.

    Each item is `(owner, whole, is_transposed)`. The list is empty for a tensor that is no matrix.
    """
    return [(owner, whole, False), (owner.T, whole.T, True)] if whole.ndim == 2 else []


def _from(owner: Tensor, whole: Tensor, turned: bool, rank: int, stored: Mapping[str, Tensor]) -> bool:
    """Whether `rank` holds complete rows, each of which occurs, bit for bit, in one of the tensors `stored`.

    If `turned` is true, `owner` and `whole` are transposed, and the columns of the tensors `stored` are compared.
    """
    rows = whole[(owner == rank).all(1)]
    # The checkpoint is read in float32: its rows are rounded to the engine's dtype, in which both are compared.
    matrices = ((tensor.T if turned else tensor).to(rows.dtype) for tensor in stored.values() if tensor.ndim > 1)
    known = {_bits(row) for matrix in matrices for row in matrix} if len(rows) else set()
    return bool(known) and all(_bits(row) in known for row in rows)


def _bits(row: Tensor) -> bytes:
    """Return the numbers of a row as bytes; float32 holds those of every narrower dtype exactly, and numpy knows it."""
    values: bytes = row.float().contiguous().numpy().tobytes()
    return values


def _same(a: Tensor, b: Tensor, close: float) -> bool:
    """Whether no entry of `a` differs from `b` by more than `close` times the RMS of `b`; true for empty tensors."""
    size = float(b.double().square().mean().sqrt()) if b.numel() else 0.0
    return bool((a.double() - b.double()).abs().max() <= close * max(size, 1e-30)) if a.numel() else True
