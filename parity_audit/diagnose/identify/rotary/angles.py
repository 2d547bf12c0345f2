"""From q and rotated q to one angular frequency per pair of components.

A rotation is a complex factor per pair and position, the same for every head and for keys:
rot = m e^{i f pos} q with q = q_a + i q_b. So at each token

    C = sum_heads conj(q) rot / sum_heads |q|^2 = m e^{i f pos}

Frequencies: from the increments between neighbouring tokens first (unambiguous below pi per token), then from
ever longer ranges, each precise enough to unwrap the next (float64). Positions as in `positions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.identify.rotary.positions import each_position, even_offset, median_increments
from parity_audit.diagnose.identify.rotary.turns import ROTATES, Layout, Turn, paired

TABLE_EPS = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What was read off: per pair the frequency (rad per position, negative where it turns backwards) and its error.

    `magnitude` is |rot| / |q| (the attention factor of yarn and longrope); `positions` and `factors` are per turn.
    """

    layout: Layout
    inv_freq: Tensor
    stderr: Tensor
    magnitude: float
    positions: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    residual: float
    n: int

    @property
    def horizon(self) -> int:
        """The furthest position that was seen."""
        return int(max(float(position.max()) for position in self.positions))

    @property
    def even(self) -> bool:
        """Whether a rotation at these positions explains all tokens."""
        return self.residual <= ROTATES


def measure(turns: Sequence[Turn], layout: Layout) -> Rotation:
    """Frequencies per pair for a known pairing; positions one by one where they are not evenly spaced."""
    factors, weights = [], []
    for turn in turns:
        a, b = paired(turn.before, layout), paired(turn.after, layout)
        weight = a.abs().square().sum(1)
        factors.append((a.conj() * b).sum(1) / weight.clamp_min(1e-300))
        weights.append(weight)
    places = [turn.position for turn in turns]
    start = _from_increments(places, factors, weights)
    positions = [place + even_offset(place, factor, start) for place, factor in zip(places, factors, strict=True)]
    rotation = _rotation(turns, layout, positions, factors, weights, start)
    if rotation.even:
        return rotation
    start = median_increments(places, factors)
    found = [each_position(factor, start, turn.length) for factor, turn in zip(factors, turns, strict=True)]
    whole = [position for position in found if position is not None]
    if len(whole) < len(turns):
        return rotation
    other = _rotation(turns, layout, whole, factors, weights, start)
    return other if other.even else rotation


def _rotation(
    turns: Sequence[Turn], layout: Layout, positions: list[Tensor], factors: list[Tensor], weights: list[Tensor],
    start: Tensor,
) -> Rotation:  # fmt: skip
    position, factor, weight = torch.cat(positions), torch.cat(factors), torch.cat(weights)
    inv_freq, stderr = _refined(position, factor, weight, start)
    magnitude = float((factor.abs() * weight).sum() / weight.sum())
    return Rotation(
        layout=layout, inv_freq=inv_freq, stderr=stderr, magnitude=magnitude, positions=tuple(positions),
        factors=tuple(factors), weights=tuple(weights), n=position.numel(),
        residual=_unexplained(turns, positions, layout, inv_freq, magnitude),
    )  # fmt: skip


def _from_increments(positions: list[Tensor], factors: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = torch.zeros(factors[0].shape[-1], dtype=torch.complex128)
    for position, factor, weight in zip(positions, factors, weights, strict=True):
        next_to = (position[1:] - position[:-1]) == 1
        step = factor[1:] * factor[:-1].conj() * torch.minimum(weight[1:], weight[:-1])
        total += step[next_to].sum(0)
    return total.angle()


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
        stderr = _by_position(p[:, 0], left).square().sum(0).sqrt() / bottom
        if horizon >= last:
            return inv_freq, torch.hypot(stderr, TABLE_EPS * inv_freq.abs())
        horizon *= 2.0


def _by_position(position: Tensor, left: Tensor) -> Tensor:
    """Sums over tokens at the same position: they share one row of the table, and so its rounding."""
    places, index = torch.unique(position, return_inverse=True)
    return torch.zeros(len(places), left.shape[1], dtype=left.dtype).index_add_(0, index, left)


def _unexplained(
    turns: Sequence[Turn], positions: list[Tensor], layout: Layout, inv_freq: Tensor, magnitude: float
) -> float:
    """Relative rms of what a pure rotation of these components leaves, the rest compared as is."""
    cost, size = 0.0, 0.0
    rest = torch.ones(turns[0].before.shape[-1], dtype=torch.bool)
    rest[layout.first : layout.first + layout.d_rot] = False
    for turn, position in zip(turns, positions, strict=True):
        angle = (position[:, None] * inv_freq)[:, None]
        turned = paired(turn.before, layout) * torch.polar(torch.full_like(angle, magnitude), angle)
        cost += float((paired(turn.after, layout) - turned).abs().square().sum())
        cost += float((turn.after - turn.before)[..., rest].square().sum())
        size += float(turn.after.square().sum())
    return math.sqrt(cost / max(size, 1e-300))
