"""Recognise what wrong sharding does to a tensor `[token, ...]` whose right value is known: moved tokens, rows or parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from parity_audit.core.limits import TINY
from parity_audit.diagnose.thresholds import ALIKE, MAJORITY

Spans = Sequence[tuple[int, int, int]]


def size(value: Tensor) -> float:
    """Return the root mean square."""
    return float(value.square().mean().sqrt()) if value.numel() else 0.0


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the RMS of the difference divided by the RMS of `b`."""
    return size(a - b) / max(size(b), TINY)


def tokens_moved(found: Tensor, expected: Tensor, tolerance: float) -> str | None:
    """Describe how tokens are permuted, if `found` has the rows of `expected` in another order; else None."""
    a, b = found.flatten(1), expected.flatten(1)
    nearest = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    own = torch.arange(len(a))
    if relative_error(a, b[nearest]) > tolerance or bool((nearest == own).all()) or len(set(nearest.tolist())) < len(a):
        return None
    spans, start = [], 0
    for place in range(1, len(a) + 1):
        if place == len(a) or nearest[place] != nearest[place - 1] + 1:
            spans.append(f"[{start}, {place}) are [{int(nearest[start])}, {int(nearest[place - 1]) + 1})")
            start = place
    return ", ".join(spans)


def locally_normed(found: Tensor, expected: Tensor, ranks: int, tolerance: float) -> bool:
    """Whether each rank normalised its part of the channels with the mean square of that part alone.

    Then each part is the right one times a number per token. With `m` the mean square of all channels and `m_r` that of one
    part, these numbers are `sqrt(m / m_r)`, and the mean of their inverse squares over the ranks is 1.
    """
    a, b = found.flatten(1), expected.flatten(1)
    if a.shape[1] % ranks:
        return False
    factors = []
    for part, right in zip(a.chunk(ranks, 1), b.chunk(ranks, 1), strict=True):
        factor = (part * right).sum(1) / right.square().sum(1)
        if relative_error(factor[:, None] * right, part) > tolerance:
            return False
        factors.append(factor)
    inverse = torch.stack(factors).pow(-2).mean(0)
    return bool((inverse - 1).abs().max() < 10 * tolerance)


def rows_moved(
    found: Tensor, table: Tensor | None, ids: Sequence[int], expected: Tensor, spans: Spans, tolerance: float
) -> tuple[int, int] | None:
    """Return the rank whose ids are looked up in rows of the table that are shifted, and the shift; None if there is none."""
    if table is None:
        return None
    wrong = [place for place in range(len(found)) if relative_error(found[place], expected[place]) > tolerance]
    held = {rank for rank, start, stop in spans for place in wrong if start <= ids[place] < stop}
    if len(held) != 1:
        return None
    unit = normalize(table, dim=1)
    votes: dict[int, int] = {}
    for place in wrong:
        length = found[place].norm()
        cosine = unit @ normalize(found[place], dim=0)
        row = int(cosine.argmax())
        if float(length) > 0 and float(cosine[row]) > 1 - ALIKE**2:
            votes[row - ids[place]] = votes.get(row - ids[place], 0) + 1
    by = max(votes, key=lambda offset: votes[offset], default=0)
    return (held.pop(), by) if by and votes[by] >= MAJORITY * len(wrong) else None


def parts_moved(found: Tensor, expected: Tensor, spans: Spans, axis: int, tolerance: float) -> list[tuple[int, int]]:
    """Return `(rank, other)` for each rank whose part is that of rank `other`; empty unless this explains all wrong parts."""
    moved: list[tuple[int, int]] = []
    for rank, start, stop in spans:
        own = found.narrow(axis, start, stop - start)
        if relative_error(own, expected.narrow(axis, start, stop - start)) <= tolerance:
            continue
        other = next(
            (
                them
                for them, a, b in spans
                if them != rank and _is(own, expected.narrow(axis, a, b - a), axis, tolerance)
            ),
            None,
        )
        if other is None:
            return []
        moved.append((rank, other))
    return moved


def _is(own: Tensor, other: Tensor, axis: int, tolerance: float) -> bool:
    """Whether two parts agree over their common length: the last part of a vocabulary is shorter and padded."""
    both = min(own.shape[axis], other.shape[axis])
    return relative_error(own.narrow(axis, 0, both), other.narrow(axis, 0, both)) <= tolerance


def parts_wrong(found: Tensor, expected: Tensor, spans: Spans, axis: int, tolerance: float) -> list[int]:
    """Return the ranks whose part differs from the expected one by more than the tolerance."""
    wrong = {
        rank for rank, start, stop in spans
        if relative_error(found.narrow(axis, start, stop - start), expected.narrow(axis, start, stop - start)) > tolerance
    }  # fmt: skip
    return sorted(wrong)
