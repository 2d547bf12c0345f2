"""From q and rotated q to one angular frequency per pair of components.

A rotation is a complex factor per pair and position, the same for every head and for keys:
rot = m e^{i f pos} q with q = q_a + i q_b. So at each token

    C = sum_heads conj(q) rot / sum_heads |q|^2 = m e^{i f pos}

Pairing: component 0 always has the highest frequency (1 rad per position unscaled), so whichever partner makes
its pair rotate like a rotation reveals the pairing: partner 1 is `adjacent`, partner d_rot/2 is `half`.
Frequencies: from the increments between neighbouring tokens first (unambiguous below pi per token), then from
ever longer ranges, each precise enough to unwrap the next (float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, f64, real, relative_rms

ROTATES = 0.03
SAME = 1e-6
LONG_POSITIONS = 128
TABLE_EPS = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens of one sequence before and after rotation: `[pos head d_head]` (query and kv heads together),
    with positions `[pos]` counted over real tokens."""

    position: Tensor
    before: Tensor
    after: Tensor


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What was read off: the pairing, d_rot, and per pair the frequency (rad per position) and its error.

    `magnitude` is |rot| / |q| (the attention factor of yarn and longrope), `offset` what positions start at.
    """

    pairing: str
    d_rot: int
    inv_freq: Tensor
    stderr: Tensor
    magnitude: float
    offsets: tuple[float, ...]
    residual: float
    n: int
    horizon: int


def turns_of(evidence: Evidence, probes: Sequence[Probe]) -> list[Turn]:
    """Every sequence whose q or k is visible before and after rotation; long ones thinned out."""
    turns = []
    for probe in probes:
        pairs = []
        for before, after in (("q", "rot_q"), ("k", "rot_k")):
            x, y = evidence.tensor(probe.name, before), evidence.tensor(probe.name, after)
            if x is not None and y is not None:
                pairs.append((x, y))
        for batch, mask in enumerate(real(probe)) if pairs else ():
            kept = mask.nonzero()[:, 0]
            chosen = _positions(kept.numel())
            at = kept[chosen]
            before_after = [torch.cat([f64(pair[side][batch, at]) for pair in pairs], 1) for side in (0, 1)]
            turns.append(Turn(position=chosen.to(torch.float64), before=before_after[0], after=before_after[1]))
    return turns


def _positions(length: int) -> Tensor:
    """All of a short sequence; of a long one the start and a geometric spread to the end."""
    if length <= 2 * LONG_POSITIONS:
        return torch.arange(length)
    far = torch.logspace(math.log10(32), math.log10(length - 1), LONG_POSITIONS, dtype=torch.float64).round().long()
    return torch.tensor(sorted({*range(32), *far.tolist(), length - 1}))


def is_unrotated(turns: Sequence[Turn]) -> bool:
    """Whether the component that rotates fastest does not move."""
    return all(relative_rms(turn.after - turn.before, turn.before) < SAME for turn in turns)


def partner_of_first(turns: Sequence[Turn]) -> tuple[int, float, float]:
    """The component that pairs with component 0, its unexplained share, and the runner-up's."""
    d_head = turns[0].before.shape[-1]
    cost, size = torch.zeros(d_head - 1, dtype=torch.float64), torch.zeros(d_head - 1, dtype=torch.float64)
    for turn in turns:
        moving = turn.position >= 1
        x, y = turn.before[moving], turn.after[moving]
        a = torch.complex(x[..., :1].expand_as(x[..., 1:]), x[..., 1:])
        b = torch.complex(y[..., :1].expand_as(y[..., 1:]), y[..., 1:])
        factor = (a.conj() * b).sum(1) / (a.abs().square().sum(1)).clamp_min(1e-300)
        unit = factor / factor.abs().clamp_min(1e-300) * b.abs().norm(dim=(0, 1)) / a.abs().norm(dim=(0, 1))
        cost += (b - unit[:, None] * a).abs().square().sum((0, 1))
        size += b.abs().square().sum((0, 1))
    share = (cost / size).sqrt()
    best = int(share.argmin())
    others = torch.cat([share[:best], share[best + 1 :]])
    return best + 1, float(share[best]), float(others.min()) if others.numel() else math.inf


def paired(x: Tensor, pairing: str, d_rot: int) -> Tensor:
    """Complex pairs `[pos head pair]` of the first d_rot components."""
    if pairing == "adjacent":
        return torch.complex(x[..., 0:d_rot:2].contiguous(), x[..., 1:d_rot:2].contiguous())
    return torch.complex(x[..., : d_rot // 2].contiguous(), x[..., d_rot // 2 : d_rot].contiguous())


def measure(turns: Sequence[Turn], pairing: str, d_rot: int) -> Rotation:
    """Frequencies per pair for a known pairing."""
    factors, weights, offsets = [], [], []
    for turn in turns:
        a, b = paired(turn.before, pairing, d_rot), paired(turn.after, pairing, d_rot)
        weight = a.abs().square().sum(1)
        factors.append((a.conj() * b).sum(1) / weight.clamp_min(1e-300))
        weights.append(weight)
    positions = [turn.position for turn in turns]
    inv_freq = _from_increments(positions, factors, weights)
    for position, factor in zip(positions, factors, strict=True):
        offsets.append(_offset(position, factor, inv_freq))
    shifted = [position + offset for position, offset in zip(positions, offsets, strict=True)]
    position, factor, weight = torch.cat(shifted), torch.cat(factors), torch.cat(weights)
    inv_freq, stderr = _refined(position, factor, weight, inv_freq)
    magnitude = float((factor.abs() * weight).sum() / weight.sum())
    return Rotation(
        pairing=pairing, d_rot=d_rot, inv_freq=inv_freq, stderr=stderr, magnitude=magnitude, offsets=tuple(offsets),
        residual=_unexplained(turns, shifted, pairing, d_rot, inv_freq, magnitude), n=position.numel(),
        horizon=int(position.max()),
    )  # fmt: skip


def _from_increments(positions: list[Tensor], factors: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = torch.zeros(factors[0].shape[-1], dtype=torch.complex128)
    for position, factor, weight in zip(positions, factors, weights, strict=True):
        next_to = (position[1:] - position[:-1]) == 1
        step = factor[1:] * factor[:-1].conj() * torch.minimum(weight[1:], weight[:-1])
        total += step[next_to].sum(0)
    return total.angle()


def _offset(position: Tensor, factor: Tensor, inv_freq: Tensor) -> float:
    """What the first token's position is, in whole positions: slow pairs say roughly, faster ones exactly."""
    near = position < 32  # further out, errors of the increments would add up
    angle = position[near, None] * inv_freq
    start = (factor[near] * torch.polar(torch.ones_like(angle), -angle)).sum(0).angle()
    order = inv_freq.abs().argsort()
    guess = 0.0
    for pair in order[inv_freq.abs()[order] > 1e-3].tolist():
        f = float(inv_freq[pair])
        left = (float(start[pair]) - f * guess + math.pi) % (2 * math.pi) - math.pi
        guess += left / f
    return float(round(guess)) if abs(guess - round(guess)) < 0.1 else guess


def _refined(position: Tensor, factor: Tensor, weight: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted least squares of the unwrapped angle through the origin, range doubled until all is used."""
    horizon, last = 4.0, float(position.abs().max())
    stderr = torch.zeros_like(inv_freq)
    while True:
        near = position.abs() <= horizon
        p, w = position[near, None], weight[near]
        off = (factor[near] * torch.polar(torch.ones_like(w), -(p * inv_freq))).angle()
        bottom = (w * p * p).sum(0).clamp_min(1e-300)
        change = (w * p * off).sum(0) / bottom
        inv_freq = inv_freq + change
        left = w * p * (off - p * change)
        stderr = left.square().sum(0).sqrt() / bottom
        if horizon >= last:
            return inv_freq, torch.hypot(stderr, TABLE_EPS * inv_freq.abs())
        horizon *= 2.0


def _unexplained(
    turns: Sequence[Turn], positions: list[Tensor], pairing: str, d_rot: int, inv_freq: Tensor, magnitude: float
) -> float:
    """Relative rms of what a pure rotation of the first d_rot components leaves, the rest compared as is."""
    cost, size = 0.0, 0.0
    for turn, position in zip(turns, positions, strict=True):
        angle = (position[:, None] * inv_freq)[:, None]
        turned = paired(turn.before, pairing, d_rot) * torch.polar(torch.full_like(angle, magnitude), angle)
        cost += float((paired(turn.after, pairing, d_rot) - turned).abs().square().sum())
        cost += float((turn.after - turn.before)[..., d_rot:].square().sum())
        size += float(turn.after.square().sum())
    return math.sqrt(cost / max(size, 1e-300))
