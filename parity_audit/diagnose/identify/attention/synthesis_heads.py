"""(slope, ALiBi slope, sink) of each head by itself, off z: see `synthesis` for the derivatives.

The sink enters as e^(logit), which is 0 where there is none and smooth there. Starts are the slope that all heads
share with no ALiBi and a little of it, so that either may vanish.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.identify.attention.law import Law
from parity_audit.diagnose.identify.attention.saturation import curve
from parity_audit.diagnose.identify.attention.synthesis import Query, size_of
from parity_audit.diagnose.identify.least_squares import Chunk, Estimate, Model, gauss_newton, squares_of

ALIBI_STARTS = (0.0, 0.5, 0.05, 0.005)
SLOPE_STEPS = (0.25, 0.5, 1.0, 2.0, 4.0)
SINK_STARTS = (1e-3, 1.0)
BEST, COARSE = 2, 3
SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The law with its errors `[head]`, and the relative rms of z that it leaves."""

    law: Law
    slope_stderr: Tensor
    alibi_stderr: Tensor
    sink_stderr: Tensor
    residual: float
    n: int


def worth_trying(parts: Sequence[Query], law: Law) -> bool:
    """Whether, to first order, parameters of each head's own would take a good part of what a law leaves.

    Rounding is not theirs to take: of n residuals three parameters explain a share of 3/n. A law that overflows is no start.
    """
    taken, squares = 0.0, 0.0
    for head in range(len(law.slope)):
        theta = torch.tensor([float(law.slope[head]), float(law.alibi[head]), float(law.sink[head])])
        chunks = [_chunk(_only(part, head), theta.to(torch.float64), law.w, True) for part in parts]
        r, j = torch.cat([r.flatten() for r, _ in chunks]), torch.cat([j.flatten(0, 1) for _, j in chunks])
        if not bool(torch.isfinite(r).all() and torch.isfinite(j).all()):
            return False
        step = torch.linalg.lstsq(j / j.norm(dim=0).clamp_min(1e-300), r[:, None]).solution
        taken += float(r.square().sum() - (r[:, None] - j / j.norm(dim=0).clamp_min(1e-300) @ step).square().sum())
        squares += float(r.square().sum())
    return taken > SHARE * squares


def fit_heads(parts: Sequence[Query], slope: float, w: float, start: Law | None, *, sinks: bool) -> Heads | None:
    """Each head's own parameters, from `start` or a grid; None where some head's z does not move with them."""
    estimates = []
    for head in range(parts[0].y.shape[0]):
        own = None if start is None else start.head(head)
        found = _fit_head([_only(part, head) for part in parts], slope, w, own, sinks=sinks)
        if found is None:
            return None
        estimates.append(found)
    values, errors = (torch.stack([getattr(e, name) for e in estimates]) for name in ("value", "stderr"))
    if not sinks:
        values, errors = (torch.cat([t, torch.zeros(len(t), 1, dtype=t.dtype)], 1) for t in (values, errors))
    law = Law(slope=values[:, 0], w=w, alibi=values[:, 1], sink=values[:, 2].clamp_min(0.0))
    squares = sum(found.squares for found in estimates)
    return Heads(
        law=law, slope_stderr=errors[:, 0], alibi_stderr=errors[:, 1], sink_stderr=errors[:, 2],
        residual=squares**0.5 / max(size_of(parts), 1e-300), n=sum(found.n for found in estimates),
    )  # fmt: skip


def _only(part: Query, head: int) -> Query:
    at = slice(head, head + 1)
    return Query(y=part.y[at], v=part.v[:, at], z=part.z[at], visible=part.visible, distance=part.distance)


def _fit_head(parts: Sequence[Query], slope: float, w: float, start: Law | None, *, sinks: bool) -> Estimate | None:
    model, tails = _model(parts, w, sinks), SINK_STARTS if sinks else (None,)
    if start is not None:
        slope, alibi, sink = float(start.slope[0]), float(start.alibi[0]), float(start.sink[0])
        best = [_start(slope, alibi, None if tail is None else max(sink, tail)) for tail in tails]
    else:
        coarse = _model(parts[:COARSE], w, sinks)
        grid = [_start(slope * step, alibi, tail) for step in SLOPE_STEPS for alibi in ALIBI_STARTS for tail in tails]
        best = sorted(grid, key=lambda start: squares_of(coarse, start))[:BEST]
    fits = [fit for fit in (gauss_newton(model, start) for start in best) if fit is not None]
    return min(fits, key=lambda fit: fit.squares, default=None)


def _start(slope: float, alibi: float, sink: float | None) -> Tensor:
    return torch.tensor([slope, alibi] + ([] if sink is None else [sink]), dtype=torch.float64)


def _model(parts: Sequence[Query], w: float, sinks: bool) -> Model:
    def model(theta: Tensor) -> Iterable[Chunk]:
        for part in parts:
            yield _chunk(part, theta, w, sinks)

    return model


def _chunk(part: Query, theta: Tensor, w: float, sinks: bool) -> Chunk:
    bent, dx, _ = curve(float(theta[0]) * part.y, w)
    s = (bent - theta[1] * part.distance).masked_fill(~part.visible, -torch.inf)
    top = s.amax(-1, keepdim=True)
    e, lost = torch.exp(s - top), torch.exp(-top)
    total = e.sum(-1, keepdim=True) + (theta[2] * lost if sinks else 0.0)
    p = e / total
    z = torch.einsum("hij,jhe->hie", p, part.v)
    jacobian = []
    for ds in (part.y * dx, -part.distance.expand_as(p)):
        weighted = p * ds
        jacobian.append(torch.einsum("hij,jhe->hie", weighted, part.v) - weighted.sum(-1, keepdim=True) * z)
    if sinks:
        jacobian.append(-z * lost / total)
    return (z - part.z).flatten(0, 1), torch.stack(jacobian, -1).flatten(0, 1)
