"""Slope, soft-cap and ALiBi off visible scores; masked entries are left out, so no window can disturb it.

Two descriptions of the scores are fitted. The curve s = g(slope q.k, w), one slope for all heads: a soft-cap bends
it. The line s_hij = slope_h q.k - alibi_h (i - j) + c_hi, per head and with a free constant per query row, which the
softmax drops: ALiBi tilts it. The line is believed where it leaves clearly less than the curve.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, drawn_points
from parity_audit.diagnose.identify.attention.law import Law, distances, plain
from parity_audit.diagnose.identify.attention.rows import Row, dot_products, visible_scores
from parity_audit.diagnose.identify.attention.saturation import LESS, CapEstimate, Pairs, fit_curve
from parity_audit.diagnose.thresholds import CLEAR, SIGMAS

FLOOR = 1e-6
EXACT = 1e-4
"""A residual that nothing but rounding leaves (several times that of float32, as errors grow with outlier channels)."""
SCALE, CAP = "attention.scale", "attention.softcap"


@dataclass(frozen=True, kw_only=True)
class Bend:
    """What was fitted: the law, its errors (None where a parameter is not there), what is left, and from where.

    `estimate` holds (slope, w) where one curve serves all heads; then `points` are some of what it was fitted to, each
    (q.k, score, score by the curve), in the order of q.k. `by_spec` is what the spec's slope and soft-cap leave.
    """

    law: Law
    estimate: CapEstimate | None
    slope_stderr: Tensor
    alibi_stderr: Tensor | None
    residual: float
    site: str
    n: int
    sink_stderr: Tensor | None = None
    points: tuple[tuple[float, float, float], ...] = ()
    by_spec: float = math.inf

    @property
    def tells(self) -> bool:
        """Whether this is more than the spec's law: it leaves rounding, or clearly less than that does."""
        return self.residual <= EXACT or self.residual <= LESS * self.by_spec


def law_of_spec(evidence: Evidence, n_heads: int) -> Law:
    """The slope and soft-cap that the spec has for this layer, no ALiBi and no sinks."""
    slope = 1.0 / evidence.spec_number(SCALE, evidence.dims["d_head"] ** 0.5)
    cap = evidence.spec_value(CAP)
    return plain(n_heads, slope, float(cap) ** -2 if isinstance(cap, (int, float)) and cap else 0.0)


def bend_from_curve(estimate: CapEstimate, n_heads: int, residual: float, site: str) -> Bend:
    """One slope and one cap for all heads."""
    slope, w = estimate.value.tolist()
    return Bend(
        law=plain(n_heads, slope, w), estimate=estimate, slope_stderr=estimate.stderr[:1].expand(n_heads),
        alibi_stderr=None, residual=residual, site=site, n=estimate.n,
    )  # fmt: skip


def bend_from_scores(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int]) -> Bend | None:
    """The description that the visible scores ask for; None where they are hidden."""
    seen = []
    for row in rows:
        scores = visible_scores(evidence, row)
        if scores is not None:
            at = torch.arange(row.length)
            seen.append((dot_products(row, heads, at, row.length), scores, distances(at, row.length)))
    if not seen:
        return None
    curve, line = _curve(seen), line_of(seen)
    if curve is None:
        return line
    clearer = line is not None and line.residual * CLEAR < curve.residual and curve.residual > FLOOR
    return line if line is not None and clearer and _tilted(line) else curve


def _tilted(line: Bend) -> bool:
    """Whether the line says anything that the curve cannot: ALiBi, or heads with slopes of their own."""
    assert line.alibi_stderr is not None
    tilt = bool((line.law.alibi.abs() > SIGMAS * line.alibi_stderr).any())
    apart = (line.law.slope - line.law.slope.mean()).abs() > SIGMAS * line.slope_stderr
    return tilt or bool(apart.any())


Seen = list[tuple[Tensor, Tensor, Tensor]]  # y, s `[head query key]`, distance `[query key]`


def _curve(seen: Seen) -> Bend | None:
    pairs: Pairs = []
    for y, scores, _ in seen:
        mask = torch.isfinite(scores)
        pairs.append((y.flatten(0, 1), scores.masked_fill(~mask, 0.0).flatten(0, 1), mask.flatten(0, 1)))
    estimate = fit_curve(pairs)
    if estimate is None:
        return None
    size = sum(float(s.square().sum()) for _, s, _ in pairs) ** 0.5
    bend = bend_from_curve(estimate, seen[0][0].shape[0], estimate.squares**0.5 / size, "attn_scores")
    return dataclasses.replace(bend, points=_sample(seen, bend.law))


def _sample(seen: Seen, law: Law) -> tuple[tuple[float, float, float], ...]:
    """Pairs of the first head, evenly over the order of q.k, both ends among them."""
    visible = [torch.isfinite(scores[0]) for _, scores, _ in seen]
    y, s = (torch.cat([one[side][0][mask] for one, mask in zip(seen, visible, strict=True)]) for side in (0, 1))
    fitted = law.scores(y[None, None], torch.zeros(1, len(y), dtype=y.dtype))[0, 0]
    return tuple((at, score, said) for at, score, said in drawn_points(y, s, fitted))


def line_of(seen: Seen) -> Bend | None:
    """Least squares per head after taking each query row's mean away; errors clustered by row."""
    sides = [_centred(y, scores, distance) for y, scores, distance in seen]
    x, s = torch.cat([x for x, _ in sides], 1), torch.cat([s for _, s in sides], 1)
    size = sum(float(scores.nan_to_num(neginf=0.0).square().sum()) for _, scores, _ in seen) ** 0.5
    hessian = torch.einsum("hnk,hnl->hkl", x, x)
    if bool((hessian.diagonal(dim1=-2, dim2=-1) <= 0).any()):
        return None
    theta = torch.linalg.solve(hessian, torch.einsum("hnk,hn->hk", x, s))
    left = s - torch.einsum("hnk,hk->hn", x, theta)
    variance = torch.linalg.inv(hessian) * left.square().sum(-1)[:, None, None] / max(x.shape[1] - 2, 1)
    errors = variance.diagonal(dim1=-2, dim2=-1).sqrt()
    law = Law(slope=theta[:, 0], w=0.0, alibi=theta[:, 1], sink=torch.zeros_like(theta[:, 0]))
    return Bend(
        law=law, estimate=None, slope_stderr=errors[:, 0], alibi_stderr=errors[:, 1],
        residual=float(left.norm()) / max(size, 1e-300), site="attn_scores", n=s.numel(),
    )  # fmt: skip


def _centred(y: Tensor, scores: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """(y, -distance) `[head entry 2]` and s `[head entry]` without their means over each row's visible keys."""
    mask = torch.isfinite(scores).to(y.dtype)
    count = mask.sum(-1, keepdim=True).clamp_min(1.0)

    def flat(t: Tensor) -> Tensor:
        t = torch.where(mask > 0, t, 0.0)
        return ((t - t.sum(-1, keepdim=True) / count) * mask).flatten(1)

    return torch.stack([flat(y), flat(-distance.expand_as(y))], -1), flat(scores)
