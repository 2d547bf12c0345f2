"""Rotated queries and keys that differ but give the same scores, because of a shift of positions or of factors.

Scores of a rotary model depend only on distances between positions. With queries and keys as complex pairs of
components, a shift by n positions multiplies both by exp(i n f) for each pair's frequency f, and conj(q) k does not
change. So a candidate's tensors are divided by the reference's: if the quotient is one complex number per row and pair,
the same for every token and head and for queries and keys, the rows only start at another position. The count n follows
from the reference's frequency of the first pair, which is its angle between the tokens at positions 0 and 1. A real
factor s on queries with 1/s on keys cancels by itself; any other factor has to be compensated by the scale of the
scores, and the block's results show whether it is.

Both cases are decided by the residual that the explanation leaves. `TOLERANCE` is a share of the tensor: it is far
above the rounding of float32 rotations (1e-6 here) and far below what two different rotations leave (more than 0.1 at a
shift of one token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.compare.source import TensorSource
from parity_audit.core.limits import TINY
from parity_audit.core.types import Probe

TOLERANCE = 1e-3
COUNTED = 0.02
"""Largest difference in radians between the angle of a pair and that of a whole number of positions."""
QUERY, KEY = "rot_q", "rot_k"
BEFORE = ("k_norm.out", "k")
SAME_FUNCTION = "same function, other positions"


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Component `first[i]` of a head is rotated together with `second[i]`; the other components are not rotated."""

    first: Tensor
    second: Tensor

    def complex(self, x: Tensor) -> Tensor:
        """The pairs of `[... d_head]` as complex numbers `[... pair]`."""
        return torch.complex(x[..., self.first], x[..., self.second])


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The real tokens of one row, `[pos head d_head]`: queries and keys, each as (candidate, reference)."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]


def cancelling_cause(candidate: TensorSource, reference: TensorSource, probe: Probe, layer: int) -> str:
    """Describe how queries and keys of a block differ, if a common shift or a factor explains it; "" if not."""
    sites = f"blocks.{layer}.{QUERY}", f"blocks.{layer}.{KEY}"
    if not all(site in side.sites(probe.name) for site in sites for side in (candidate, reference)):
        return ""
    if any(candidate.shape(probe.name, site) != reference.shape(probe.name, site) for site in sites):
        return ""
    tensors = [(_whole(candidate, probe, site), _whole(reference, probe, site)) for site in sites]
    real = torch.tensor(probe.mask, dtype=torch.bool)
    # At padded positions a reference has numbers, and an engine that does not pad has none.
    factors = [_factor(own[real], true[real]) for own, true in tensors]
    rows = _rows(real, tensors, factors)
    if all(_relative(own, true) < TOLERANCE for row in rows for own, true in (row.query, row.key)):
        return _scaled(factors)
    shifts = _shifts(rows, _angles(reference, probe, layer))
    if shifts is None:
        return ""
    scaled = _scaled(factors)
    return f"{SAME_FUNCTION}: {shifts} in queries and keys alike" + (f"; {scaled}" if scaled else "")


def _whole(side: TensorSource, probe: Probe, site: str) -> Tensor:
    return side.rows(probe.name, site, 0, side.shape(probe.name, site)[1]).double()


def _factor(own: Tensor, true: Tensor) -> float:
    """The ratio of the candidate's norm to the reference's."""
    return float(own.norm() / true.norm().clamp_min(TINY))


def _scaled(factors: list[float]) -> str:
    """Words for the factors of queries and keys that differ from 1."""
    named = [
        f"{name} are multiplied by {factor:.6g}"
        for name, factor in zip(("queries", "keys"), factors, strict=True)
        if abs(factor - 1.0) > TOLERANCE
    ]
    return " and ".join(named) + " before their product, and the scores are not" if named else ""


def _rows(real: Tensor, tensors: list[tuple[Tensor, Tensor]], factors: list[float]) -> list[_Row]:
    """The rows of a probe without padding, the candidate's divided by its factors; `real` is the probe's mask `[row pos]`."""
    rows = []
    for number, keep in enumerate(real):
        query, key = (
            (own[number][keep] / max(factor, TINY), true[number][keep])
            for (own, true), factor in zip(tensors, factors, strict=True)
        )
        rows.append(_Row(query=query, key=key))
    return rows


def _relative(own: Tensor, true: Tensor) -> float:
    return float((own - true).norm() / true.norm().clamp_min(TINY))


def _shifts(rows: list[_Row], per_position: Tensor | None) -> str | None:
    """Describe by how many positions each row is shifted; None if a constant shift does not explain some row."""
    moved = max(rows, key=lambda row: _relative(*row.key))
    pairing = _pairing(*moved.key)
    found = [turn for row in rows if (turn := _turn(row, pairing)) is not None]
    if len(found) < len(rows):
        return None
    counts = [_count(turn.angle(), per_position) for turn in found]
    if None in counts:
        return "positions are shifted by a constant"
    if len(set(counts)) == 1:
        return f"positions are shifted by {counts[0]:+d}"
    return (
        "positions of each row are shifted by a constant of its own ("
        + ", ".join(f"{n:+d}" for n in counts if n is not None)
        + ")"
    )


def _pairing(own: Tensor, true: Tensor) -> Pairing:
    """Find which components are rotated together: the partner of component 0 that leaves the smallest residual decides.

    The partner is either the next component (adjacent pairs) or the component at half the rotated width (halves).
    """
    width = own.shape[-1]
    a = torch.complex(true[..., :1].expand_as(true[..., 1:]), true[..., 1:]).flatten(0, 1)
    b = torch.complex(own[..., :1].expand_as(own[..., 1:]), own[..., 1:]).flatten(0, 1)
    turn = (a.conj() * b).sum(0)
    left = (b - turn / turn.abs().clamp_min(TINY) * a).norm(dim=0) / b.norm(dim=0).clamp_min(TINY)
    partner = int(left.argmin()) + 1
    if partner == 1:
        return Pairing(first=torch.arange(0, width, 2), second=torch.arange(1, width, 2))
    return Pairing(first=torch.arange(partner), second=torch.arange(partner, min(2 * partner, width)))


def _turn(row: _Row, pairing: Pairing) -> Tensor | None:
    """The rotation from the reference's queries and keys to the candidate's, one complex number per pair `[pair]`; None
    if none."""
    if len(pairing.first) != len(pairing.second):
        return None
    sides = [(pairing.complex(own), pairing.complex(true)) for own, true in (row.query, row.key)]
    total = sum((true.conj() * own).sum((0, 1)) for own, true in sides)
    assert isinstance(total, Tensor)
    turn = total / total.abs().clamp_min(TINY)
    still = torch.ones(row.key[0].shape[-1], dtype=torch.bool)
    still[pairing.first], still[pairing.second] = False, False
    for (own, true), (plain_own, plain_true) in zip(sides, (row.query, row.key), strict=True):
        left = (own - turn * true).abs().square().sum() + (plain_own - plain_true)[..., still].square().sum()
        if math.sqrt(float(left)) > TOLERANCE * float(plain_true.norm()):
            return None
    return turn


def _count(angles: Tensor, per_position: Tensor | None) -> int | None:
    """The whole number of positions that explains the angles of all pairs; None if none explains them within `COUNTED`."""
    if per_position is None or per_position.shape != angles.shape or not float(per_position[0]):
        return None
    count = round(float(angles[0] / per_position[0]))
    left = _wrapped(angles - count * per_position)
    return count if float(left.abs().max()) < COUNTED else None


def _wrapped(angles: Tensor) -> Tensor:
    return (angles + math.pi) % (2 * math.pi) - math.pi


def _angles(reference: TensorSource, probe: Probe, layer: int) -> Tensor | None:
    """The angle by which the reference rotates each pair between positions 0 and 1, `[pair]`.

    None if keys before rotation are not visible, or if the first row has fewer than two tokens.
    """
    held = reference.sites(probe.name)
    before = next((site for name in BEFORE if (site := f"blocks.{layer}.{name}") in held), None)
    keep = torch.tensor(probe.mask[0], dtype=torch.bool)
    if before is None or int(keep.sum()) < 2:
        return None
    plain, turned = (_whole(reference, probe, site)[0][keep] for site in (before, f"blocks.{layer}.{KEY}"))
    pairing = _pairing(turned[1:2], plain[1:2])
    if len(pairing.first) != len(pairing.second):
        return None
    angles = (pairing.complex(plain[:2]).conj() * pairing.complex(turned[:2])).sum(1).angle()
    return _wrapped(angles[1] - angles[0])
