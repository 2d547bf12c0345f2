"""Which theta and which scaling explain a measured table of frequencies?

The formulas are those of `formulas.frequencies.rope_table`, the hypotheses those of `scalings`, tried from the simplest:
the first whose every pair lies within its error wins. Fitting is Gauss-Newton on the logarithm of the table, in the
logarithm of the parameters, with numeric derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.identify.rotary.scalings import Hypothesis, hypotheses
from parity_audit.diagnose.thresholds import ALIKE, SIGMAS

SURE = 0.05
LOG_EPS = 3e-7

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


def explain(
    inv_freq: Tensor, stderr: Tensor, spec_theta: float | None, spec_scaling: Any, lengths: Sequence[int] = (),
    log_eps: float = LOG_EPS,
) -> TableFit | None:  # fmt: skip
    """The simplest hypothesis within errors, or None when none is.

    `lengths` are those of the sequences it came from, `log_eps` the relative error of any entry that rounding explains.
    """
    sure = (inv_freq > 0) & (stderr < SURE * inv_freq)
    if int(sure.sum()) < 2:
        return None
    measured = inv_freq.clamp_min(1e-300).log()
    sigma = torch.where(sure, torch.hypot(stderr / inv_freq.abs().clamp_min(1e-300), torch.tensor(log_eps)), torch.inf)
    tried = hypotheses(measured, sigma, spec_theta, spec_scaling, lengths)
    return next((found for one in tried if (found := _tested(one, measured, sigma)) is not None), None)


def _tested(hypothesis: Hypothesis, measured: Tensor, sigma: Tensor) -> TableFit | None:
    """The hypothesis with its best parameters, None when some pair lies outside its error."""

    def table(p: Tensor) -> Tensor:
        return hypothesis.table(p, measured.numel())

    try:
        found = _fitted(table, hypothesis.start, measured, sigma)
    except (ValueError, OverflowError, ZeroDivisionError):
        return None  # the search left the range where the formula means anything
    if found is None:
        return None
    p, covariance = found
    worst = float(((table(p) - measured) / sigma).abs().max())
    values = p.exp().tolist()
    if worst > SIGMAS or not math.isclose(values[0], hypothesis.theta or values[0], rel_tol=ALIKE):
        return None
    if not hypothesis.plausible(values):
        return None
    errors = (covariance.diagonal().clamp_min(0).sqrt() * p.exp() * max(1.0, worst / 2)).tolist()
    return TableFit(
        name=hypothesis.name, theta=values[0], theta_stderr=errors[0],
        scaling=(hypothesis.shown or hypothesis.scaling)(values[1:]), worst=worst,
        pairs=int(torch.isfinite(sigma).sum()), stderr=dict(zip(hypothesis.names[1:], errors[1:], strict=True)),
    )  # fmt: skip


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
