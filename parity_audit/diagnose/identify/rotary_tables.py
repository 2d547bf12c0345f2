"""Which theta and which scaling explain a measured table of frequencies?

The formulas are those of `specs.rope.rope_table`. Of llama3's thresholds only original/low and original/high
can be seen, so the original context is the spec's, or 8192. Dynamic NTK is another theta. Hypotheses are tried from
the simplest: the spec's own scaling, none, linear, llama3 with known thresholds, llama3 with free ones. The first
whose every pair lies within its error wins. Fitting is Gauss-Newton on the logarithm of the table, in the
logarithm of the parameters, with numeric derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity_audit.specs.rope import rope_table

KNOWN = ("default", "linear", "llama3")
LLAMA3_THRESHOLDS = (1.0, 4.0, 8192.0)
SURE = 0.05
LOG_EPS = 3e-7
SIGMAS = 8.0

Table = Callable[[Tensor], Tensor]  # parameters to log frequencies


@dataclass(frozen=True, kw_only=True)
class TableFit:
    """A hypothesis that explains the table: theta with its error, the scaling, the worst pair in sigmas."""

    name: str
    theta: float
    theta_stderr: float
    scaling: dict[str, Any] | None
    worst: float
    pairs: int
    stderr: dict[str, float] = field(default_factory=dict)


def log_table(theta: float, scaling: dict[str, Any] | None, pairs: int) -> Tensor:
    """Log frequencies of these values.

    Raises:
        ValueError: a scaling type that `specs.rope` does not know.
    """
    return torch.tensor(rope_table(theta, scaling, 2 * pairs), dtype=torch.float64).log()


def thresholds_of(scaling: Any) -> tuple[float, float, float]:
    """low_freq_factor, high_freq_factor and original context of a spec's scaling, or Llama 3.1's."""
    given = scaling if isinstance(scaling, dict) else {}
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, original = (float(given.get(name, usual)) for name, usual in zip(names, LLAMA3_THRESHOLDS, strict=True))
    return low, high, original


def explain(inv_freq: Tensor, stderr: Tensor, spec_theta: float | None, spec_scaling: Any) -> TableFit | None:
    """The simplest hypothesis within errors, or None when none is."""
    sure = (inv_freq > 0) & (stderr < SURE * inv_freq)
    if int(sure.sum()) < 2:
        return None
    measured = inv_freq.clamp_min(1e-300).log()
    sigma = torch.where(sure, torch.hypot(stderr / inv_freq.abs().clamp_min(1e-300), torch.tensor(LOG_EPS)), torch.inf)
    pairs = inv_freq.numel()
    for hypothesis in _hypotheses(measured, sigma, spec_theta, spec_scaling, pairs):
        found = _tested(hypothesis, measured, sigma)
        if found is not None:
            return found
    return None


def _tested(hypothesis: Hypothesis, measured: Tensor, sigma: Tensor) -> TableFit | None:
    """The hypothesis with its best parameters, None when some pair lies outside its error."""

    def table(p: Tensor) -> Tensor:
        return hypothesis.table(p, measured.numel())

    found = _fitted(table, hypothesis.start, measured, sigma)
    if found is None:
        return None
    p, covariance = found
    worst = float(((table(p) - measured) / sigma).abs().max())
    if worst > SIGMAS:
        return None
    values = p.exp().tolist()
    errors = (covariance.diagonal().clamp_min(0).sqrt() * p.exp() * max(1.0, worst / 2)).tolist()
    return TableFit(
        name=hypothesis.name, theta=values[0], theta_stderr=errors[0], scaling=hypothesis.scaling(values[1:]),
        worst=worst, pairs=int(torch.isfinite(sigma).sum()),
        stderr=dict(zip(hypothesis.names[1:], errors[1:], strict=True)),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A formula with log theta (and log factor, low, high) free: start values, and the scaling they mean."""

    name: str
    start: Tensor
    scaling: Callable[[list[float]], dict[str, Any] | None]
    names: tuple[str, ...]

    def table(self, p: Tensor, pairs: int) -> Tensor:
        """Log frequencies."""
        values = p.exp().tolist()
        return log_table(values[0], self.scaling(values[1:]), pairs)


def _hypotheses(
    measured: Tensor, sigma: Tensor, spec_theta: float | None, spec_scaling: Any, pairs: int
) -> list[Hypothesis]:
    """From the simplest to the freest."""
    low, high, original = thresholds_of(spec_scaling)
    theta = _start_theta(measured, sigma, pairs)
    first = float(measured[0].neg().clamp(min=0.0))
    plain = -theta * torch.arange(pairs, dtype=torch.float64) / pairs
    tail = float((plain - measured)[torch.isfinite(sigma)][-1].clamp(min=0.1))

    def llama3(values: list[float]) -> dict[str, Any]:
        factor, lower, upper = (*values, low, high)[:3] if len(values) == 1 else values
        return {"rope_type": "llama3", "factor": factor, "low_freq_factor": lower, "high_freq_factor": upper,
                "original_max_position_embeddings": original}  # fmt: skip

    def of(name: str, start: list[float], scaling: Callable[[list[float]], Any], *names: str) -> Hypothesis:
        return Hypothesis(
            name=name, start=torch.tensor(start, dtype=torch.float64), scaling=scaling, names=("theta", *names)
        )

    free = [theta, tail, *_start_thresholds(plain, measured, sigma, tail, original)]
    out = [
        of("default", [theta], lambda _: None),
        of("linear", [theta, first], lambda v: {"rope_type": "linear", "factor": v[0]}, "factor"),
        of("llama3", [theta, tail], llama3, "factor"),
        of("llama3 with other thresholds", free, llama3, "factor", "low_freq_factor", "high_freq_factor"),
    ]
    if spec_theta and (spec_scaling or {}).get("rope_type", "default") in KNOWN:
        out.insert(0, of("spec", [math.log(spec_theta)], lambda _: spec_scaling))
    return out


def _start_thresholds(
    plain: Tensor, measured: Tensor, sigma: Tensor, tail: float, original: float
) -> tuple[float, float]:
    """log low and log high from the pairs at the ends of the transition, or either side of it where it is sharp.

    smooth = (turns - low) / (high - low) is a line in turns = original / wavelength; the two pairs nearest its
    middle give it, clipped so that pairs beyond are flat.
    """
    sure = torch.isfinite(sigma)
    turns = original * plain[sure].exp() / (2 * math.pi)
    smooth = (((measured - plain)[sure]).exp() - math.exp(-tail)) / (1 - math.exp(-tail))
    above, below = turns[smooth > 0.99], turns[smooth < 0.01]
    inside = (smooth >= 0.01) & (smooth <= 0.99)
    low = float(below.max()) if below.numel() else float(turns.min())
    high = float(above.min()) if above.numel() else float(turns.max())
    if int(inside.sum()) >= 2:
        t, s = turns[inside], smooth[inside]
        slope = float((t[0] - t[-1]) / (s[0] - s[-1]))
        low, high = float(t[-1] - s[-1] * slope), float(t[-1] + (1 - s[-1]) * slope)
    elif bool(inside.any()):
        t1, s1 = float(turns[inside]), float(smooth[inside])
        low = (t1 - s1 * high) / (1 - s1) if t1 > s1 * high else low
    return math.log(max(low, 1e-6)), math.log(max(high, 1e-5))


def _start_theta(measured: Tensor, sigma: Tensor, pairs: int) -> float:
    """log theta from the fastest pairs, which no scaling but `linear` touches; slopes only, for its sake."""
    index = torch.arange(pairs, dtype=torch.float64) / pairs
    few = torch.isfinite(sigma).nonzero()[:, 0][: max(2, pairs // 8)]
    x, y = index[few] - index[few[0]], measured[few] - measured[few[0]]
    return float(-(x * y).sum() / (x * x).sum().clamp_min(1e-300))


def _fitted(table: Table, start: Tensor, measured: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor] | None:
    """Gauss-Newton with damping; parameters and their covariance."""
    p, damping = start.clone().to(torch.float64), 1e-6
    cost = float(((table(p) - measured) / sigma).square().sum())
    for _ in range(60):
        jacobian = _derivatives(table, p) / sigma[:, None]
        hessian = jacobian.T @ jacobian
        scale = hessian.diagonal().clamp_min(1e-12)
        step = torch.linalg.solve(hessian + damping * torch.diag(scale), jacobian.T @ ((table(p) - measured) / sigma))
        trial = float(((table(p - step) - measured) / sigma).square().sum())
        if math.isfinite(trial) and trial <= cost:
            done = cost - trial <= 1e-12 * cost
            p, cost, damping = p - step, trial, max(damping / 10, 1e-12)
            if done:
                break
        else:
            damping *= 10
            if damping > 1e8:
                break
    jacobian = _derivatives(table, p) / sigma[:, None]
    hessian = jacobian.T @ jacobian
    return (p, torch.linalg.pinv(hessian)) if math.isfinite(cost) and bool(torch.isfinite(hessian).all()) else None


def _derivatives(table: Table, p: Tensor) -> Tensor:
    columns = []
    for k in range(p.numel()):
        h = torch.zeros_like(p)
        h[k] = 1e-6
        columns.append((table(p + h) - table(p - h)) / 2e-6)
    return torch.stack(columns, -1)
