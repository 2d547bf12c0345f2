"""Attention recomputed: what z would be for a given scale, soft-cap, ALiBi, sinks and mask.

    z(theta) = p(theta) v        p as in `law`
    dz/dtheta = sum_j p_j (ds_j - sum_i p_i ds_i) v_j,     dz/dsink = -z / (sum_j e^{s_j} + sink)

This is how constants are read where a backend hides its scores (paged attention, sdpa): Gauss-Newton on
z over (slope, w), starting from the best of a grid, because softmax flattens far from the truth; then, where that
leaves too much, over (slope, alibi, sink) of each head by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.identify.attention.law import Law, distances
from parity_audit.diagnose.identify.attention.rows import Row, dot_products, looks_at
from parity_audit.diagnose.identify.attention.saturation import CapEstimate, cap_of, curve, with_straight
from parity_audit.diagnose.identify.least_squares import Chunk, Estimate, Model, gauss_newton, squares_of

GRID_PARTS = 3
CAP_GRID = (None, 100.0, 50.0, 30.0, 20.0, 10.0)
SCALE_STEPS = [2.0 ** (step / 2) for step in range(-6, 7)]


@dataclass(frozen=True, kw_only=True)
class Query:
    """Some query rows of one sequence: y `[head query key]`, v `[key head d_head]`, z `[head query d_head]`,
    visible and distance `[query key]`."""

    y: Tensor
    v: Tensor
    z: Tensor
    visible: Tensor
    distance: Tensor


def queries_of(row: Row, heads: Sequence[int], queries: Tensor, window: int | None, *, ahead: int | None = 0) -> Query:
    """The maths of these query positions; `ahead` is how many keys after itself a query sees (None: all)."""
    assert row.v is not None
    assert row.z is not None
    keys = row.length if ahead is None else min(row.length, int(queries.max()) + 1 + max(ahead, 0))
    return Query(
        y=dot_products(row, heads, queries, keys), v=row.v[:keys, list(heads)], z=row.z[queries].transpose(0, 1),
        visible=looks_at(queries, keys, window, ahead), distance=distances(queries, keys),
    )  # fmt: skip


def model_of(parts: Sequence[Query], base: Law | None = None) -> Model:
    """Residuals of z and their Jacobian over (slope, w); one cluster is one head's query."""

    def model(theta: Tensor) -> Iterable[Chunk]:
        for part in parts:
            yield _chunk(part, float(theta[0]), float(theta[1]), base)

    return model


def _chunk(part: Query, slope: float, w: float, base: Law | None) -> Chunk:
    s, dx, dw = curve(slope * part.y, w)
    if base is not None:
        s = s - base.alibi[:, None, None] * part.distance
    p = torch.softmax(s.masked_fill(~part.visible, -torch.inf), -1)
    z = torch.einsum("hij,jhe->hie", p, part.v)
    jacobian = []
    for ds in (part.y * dx, dw):
        weighted = p * ds
        jacobian.append(torch.einsum("hij,jhe->hie", weighted, part.v) - weighted.sum(-1, keepdim=True) * z)
    residual = (z - part.z).flatten(0, 1)
    return residual, torch.stack(jacobian, -1).flatten(0, 1)


def size_of(parts: Sequence[Query]) -> float:
    """Root of the sum of squares of z over these queries."""
    return math.sqrt(sum(float(part.z.square().sum()) for part in parts))


def fit_synthesis(
    parts: Sequence[Query], slope: float, caps: Sequence[float], start: Tensor | None = None
) -> CapEstimate | None:
    """Fit (slope, w) from `start`, or from the best of a grid round `slope` with these caps and the usual ones."""
    model = model_of(parts)
    if start is not None:
        found = gauss_newton(model, start)
        return None if found is None else with_straight(found, _straight(model, found))
    ws = sorted({0.0 if cap is None else cap**-2 for cap in (*CAP_GRID, *caps)})
    grid = [torch.tensor([slope * step, w], dtype=torch.float64) for step in SCALE_STEPS for w in ws]
    coarse = model_of(parts[:GRID_PARTS])
    best = sorted(grid, key=lambda start: squares_of(coarse, start))[:3]
    fits = [fit for fit in (gauss_newton(model, start) for start in best) if fit is not None]
    found = min(fits, key=lambda fit: fit.squares, default=None)
    return None if found is None else with_straight(found, _straight(model, found))


def _straight(model: Model, found: Estimate) -> float:
    """What the best slope leaves without a cap; as much as with one where there is none to ask about."""
    if cap_of(float(found.value[1]), float(found.stderr[1]))[0] is None:
        return found.squares

    def uncapped(theta: Tensor) -> Iterable[Chunk]:
        for residual, jacobian in model(torch.stack([theta[0], torch.zeros_like(theta[0])])):
            yield residual, jacobian[..., :1]

    fit = gauss_newton(uncapped, found.value[:1])
    return squares_of(model, torch.zeros(2, dtype=torch.float64)) if fit is None else fit.squares


def residuals_of(part: Query, law: Law) -> Tensor:
    """z as the law makes it minus z `[head query d_head]`."""
    p = law.pattern(law.scores(part.y, part.distance), part.visible)
    return torch.einsum("hij,jhe->hie", p, part.v) - part.z


def unexplained(parts: Sequence[Query], law: Law) -> float:
    """Relative rms of z that a law leaves."""
    left = sum(float(residuals_of(part, law).square().sum()) for part in parts)
    return math.sqrt(left) / max(size_of(parts), 1e-300)
