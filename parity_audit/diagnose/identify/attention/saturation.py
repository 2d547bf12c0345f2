"""The soft-cap curve, in the parametrisation that is smooth at "no cap".

    s = g(x, w) = tanh(x sqrt(w)) / sqrt(w),   w = 1/cap^2,   g(x, 0) = x,   x = slope * y

In the cap itself "none" lies at infinity and least squares cannot reach it; in w it is an ordinary point,
and an estimate of w with its standard error says by itself whether there is a cap. Below w = 0 (where
noise may lead) the curve is continued by its series x - w x^3 / 3.

    dg/dx = 1 - w g^2,   dg/dw = (x dg/dx - g) / (2 w)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import KnobFit
from parity_audit.diagnose.identify.least_squares import Chunk, Estimate, gauss_newton, squares_of
from parity_audit.diagnose.thresholds import SIGMAS

SERIES_BELOW = 1e-3
LESS = 0.5
"""A hypothesis with a constant of its own is one only where it leaves less than this share of what is left without it: where
something else is wrong, every freer curve leaves a little less."""


@dataclass(frozen=True, kw_only=True)
class CapEstimate(Estimate):
    """(slope, w), and the residual sum of squares that the best slope leaves without a cap."""

    straight: float

    @property
    def bends(self) -> bool:
        """Whether a cap leaves clearly less than none does."""
        return self.squares <= LESS**2 * self.straight


def with_straight(estimate: Estimate, straight: float) -> CapEstimate:
    """The same estimate beside what is left without a cap."""
    return CapEstimate(
        **{item.name: getattr(estimate, item.name) for item in dataclasses.fields(Estimate)}, straight=straight
    )


def curve(x: Tensor, w: float) -> tuple[Tensor, Tensor, Tensor]:
    """g, dg/dx and dg/dw at every x."""
    if w <= 0.0:
        return x - w * x**3 / 3, 1 - w * x.square(), -(x**3) / 3
    wx2 = w * x.square()
    near = wx2 < SERIES_BELOW
    g = torch.tanh(x * math.sqrt(w)) / math.sqrt(w)
    slope = 1 - w * g.square()
    bend = (x * slope - g) / (2 * w)
    series = x * (1 - wx2 / 3 + 2 * wx2.square() / 15 - 17 * wx2**3 / 315)
    series_bend = x**3 * (-1 / 3 + 4 * wx2 / 15 - 51 * wx2.square() / 315)
    return torch.where(near, series, g), slope, torch.where(near, series_bend, bend)


Pairs = list[tuple[Tensor, Tensor, Tensor]]  # y, s, mask, each [cluster item]


def fit_curve(pairs: Pairs) -> CapEstimate | None:
    """Fit (slope, w) of s = g(slope * y, w) over the unmasked entries; None when they say nothing.

    Starts from the linearised problem (atanh) at a few caps just above the largest |s| and at none, because
    a start far beyond the bend has no gradient.
    """

    def model(theta: Tensor) -> Iterable[Chunk]:
        slope, w = float(theta[0]), float(theta[1])
        for y, s, mask in pairs:
            g, dx, dw = curve(slope * y, w)
            keep = mask.to(torch.float64)
            yield (g - s) * keep, torch.stack([y * dx * keep, dw * keep], -1)

    largest = max((float((s * m).abs().max()) for _, s, m in pairs if s.numel()), default=0.0)
    if largest == 0.0:
        return None
    starts = [_linearised(pairs, None), *(_linearised(pairs, times * largest) for times in (1.0001, 1.02, 1.3, 3.0))]
    best = sorted(starts, key=lambda start: squares_of(model, start))[:2]
    fits = [fit for fit in (gauss_newton(model, start) for start in best) if fit is not None]
    found = min(fits, key=lambda fit: fit.squares, default=None)
    return None if found is None else with_straight(found, squares_of(model, starts[0]))


def _linearised(pairs: Pairs, cap: float | None) -> Tensor:
    top, bottom = 0.0, 0.0
    for y, s, mask in pairs:
        x = s if cap is None else cap * torch.atanh((s / cap).clamp(-1 + 1e-12, 1 - 1e-12))
        top += float((x * y * mask).sum())
        bottom += float((y * y * mask).sum())
    return torch.tensor([top / max(bottom, 1e-300), 0.0 if cap is None else cap**-2], dtype=torch.float64)


def cap_of(w: float, stderr: float) -> tuple[float | None, float | None]:
    """The cap and its standard error; None, None where w is indistinguishable from 0."""
    if w <= 0.0 or w < SIGMAS * stderr:
        return None, None
    return w**-0.5, 0.5 * w**-1.5 * stderr


def cap_fit(
    knob: str, layer: int | None, estimate: CapEstimate, *, residual: float, site: str, spec_cap: object
) -> KnobFit | str:
    """The soft-cap as a KnobFit, or the reason why these values cannot tell."""
    w, stderr = float(estimate.value[1]), float(estimate.stderr[1])
    cap, cap_stderr = cap_of(w, stderr)
    expected = float(spec_cap) ** -2 if isinstance(spec_cap, (int, float)) and spec_cap else 0.0
    if cap is None and SIGMAS * stderr > expected > 0.0:
        least = (SIGMAS * stderr) ** -0.5
        return f"values too small to show a cap of {spec_cap:g}; one below {least:.3g} would show"
    if cap is not None and not estimate.bends:
        share = math.sqrt(estimate.squares / estimate.straight)
        return f"one of {cap:.4g} leaves {share:.2g} of what none leaves: too much to be one"
    seen = (SIGMAS * stderr) ** -0.5 if stderr > 0 else math.inf
    return KnobFit(
        knob=knob, layer=layer, value=cap, stderr=cap_stderr, residual=residual, n=estimate.n, site=site,
        coordinate=(w, stderr),
        evidence={"inverse_square": w, "inverse_square_stderr": stderr, "a_cap_below_this_would_show": seen},
    )  # fmt: skip
