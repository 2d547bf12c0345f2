"""Nonlinear least squares with standard errors that survive correlated rounding.

Residuals come in clusters (one query row, one token): rounding errors inside a cluster share causes, so
the covariance is the larger, per parameter, of the classical one and the cluster-robust sandwich

    H^-1 (sum_g J_g' r_g r_g' J_g) H^-1,   H = sum_g J_g' J_g.

Steps are Levenberg-Marquardt. Everything is float64; data arrive in chunks, so memory is one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Chunk = tuple[Tensor, Tensor]  # residual [cluster item], jacobian [cluster item parameter]
Model = Callable[[Tensor], Iterable[Chunk]]

STEPS = 40
CONVERGED = 1e-13


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Fitted parameters, their standard errors, the residual sum of squares, and counts."""

    value: Tensor
    stderr: Tensor
    squares: float
    n: int
    clusters: int

    @property
    def rms(self) -> float:
        """Root mean square residual, in the unit of the data."""
        return math.sqrt(self.squares / max(self.n, 1))


@dataclass(frozen=True, kw_only=True)
class _Sums:
    hessian: Tensor
    gradient: Tensor
    meat: Tensor
    squares: float
    n: int
    clusters: int


def _sums(model: Model, theta: Tensor) -> _Sums:
    size = theta.numel()
    hessian, meat = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    gradient = torch.zeros(size, dtype=torch.float64)
    squares, n, clusters = 0.0, 0, 0
    for residual, jacobian in model(theta):
        scores = torch.einsum("ci,cik->ck", residual, jacobian)
        hessian += torch.einsum("cik,cil->kl", jacobian, jacobian)
        gradient += scores.sum(0)
        meat += scores.T @ scores
        squares += float(residual.square().sum())
        n += int((jacobian != 0).any(-1).sum())
        clusters += residual.shape[0]
    return _Sums(hessian=hessian, gradient=gradient, meat=meat, squares=squares, n=n, clusters=clusters)


def squares_of(model: Model, theta: Tensor) -> float:
    """The residual sum of squares at given parameters."""
    return sum(float(residual.square().sum()) for residual, _ in model(theta))


def gauss_newton(model: Model, start: Tensor) -> Estimate | None:
    """Minimise the residual sum of squares from `start`; None when the data do not move with a parameter.

    A search that ends before it has converged is the fit of a hypothesis that does not hold: its residual says so.
    """
    theta, sums, damping = start.clone(), _sums(model, start), 1e-6
    for _ in range(STEPS):
        if not _usable(sums):
            return None
        diagonal = sums.hessian.diagonal()
        step = torch.linalg.solve(sums.hessian + damping * torch.diag(diagonal), sums.gradient)
        trial = _sums(model, theta - step)
        if math.isfinite(trial.squares) and trial.squares <= sums.squares:
            small = bool((step.abs() <= CONVERGED * theta.abs().clamp_min(1e-30)).all())
            gain = sums.squares - trial.squares
            theta, sums, damping = theta - step, trial, max(damping / 10.0, 1e-15)
            if small or gain <= 1e-14 * sums.squares:
                break
        elif damping > 1e6:
            break
        else:
            damping *= 10.0
    return _estimate(theta, sums)


def _usable(sums: _Sums) -> bool:
    diagonal = sums.hessian.diagonal()
    return bool(torch.isfinite(sums.hessian).all() and (diagonal > 0.0).all())


def _estimate(theta: Tensor, sums: _Sums) -> Estimate | None:
    if not _usable(sums):
        return None
    scale = sums.hessian.diagonal().sqrt()
    inverse = torch.linalg.pinv(sums.hessian / torch.outer(scale, scale)) / torch.outer(scale, scale)
    classical = inverse * (sums.squares / max(sums.n - theta.numel(), 1))
    robust = inverse @ sums.meat @ inverse * (sums.clusters / max(sums.clusters - theta.numel(), 1))
    variance = torch.maximum(classical.diagonal(), robust.diagonal()).clamp_min(0.0)
    return Estimate(
        value=theta, stderr=variance.sqrt(), squares=sums.squares, n=sums.n, clusters=sums.clusters
    )  # fmt: skip


def ratio(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Estimate:
    """The factor a of y = a x over `[cluster item]`, by (weighted) least squares."""
    w = torch.ones_like(x) if weight is None else weight
    a = float((w * x * y).sum() / (w * x * x).sum())
    sums = _Sums(
        hessian=(w * x * x).sum().reshape(1, 1), gradient=torch.zeros(1, dtype=torch.float64),
        meat=(w * x * (y - a * x)).sum(-1).square().sum().reshape(1, 1),
        squares=float((w * (y - a * x).square()).sum()), n=x.numel(), clusters=x.shape[0],
    )  # fmt: skip
    estimate = _estimate(torch.tensor([a], dtype=torch.float64), sums)
    assert estimate is not None, "a regressor that is zero everywhere was passed"
    return estimate
