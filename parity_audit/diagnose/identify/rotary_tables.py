"""Which theta and which scaling explain a measured table of frequencies?

    default   f_i = theta^(-2i/d_rot)
    linear    f_i / factor
    llama3    f_i where the wavelength 2 pi / f_i is below L/high, f_i / factor where it is above L/low, and
              between them ((1 - s)/factor + s) f_i with s = (L/wavelength - low) / (high - low)

(L = original_max_position_embeddings; only L/low and L/high can be seen, so L is the spec's, or 8192.)
Dynamic NTK is another theta. Hypotheses are tried from the simplest: the spec's own values, default, linear,
llama3 with known thresholds, llama3 with free ones. The first whose every pair lies within its error wins.
Fitting is Gauss-Newton in the logarithm of the table, with numeric derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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


def default_table(log_theta: Tensor, pairs: int) -> Tensor:
    """Log frequencies without scaling."""
    return -log_theta * torch.arange(pairs, dtype=torch.float64) / pairs


def llama3_table(log_theta: Tensor, factor: Tensor, low: Tensor, high: Tensor, original: float, pairs: int) -> Tensor:
    """Log frequencies with the scaling of Llama 3.1 (transformers `_compute_llama3_parameters`)."""
    plain = default_table(log_theta, pairs)
    turns = original * plain.exp() / (2 * math.pi)  # L / wavelength
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain + torch.log((1 - smooth) / factor + smooth)


def table_of(theta: float, scaling: dict[str, Any] | None, pairs: int) -> Tensor | None:
    """Log frequencies of a spec's values; None for a scaling this module does not know."""
    log_theta = torch.tensor(math.log(theta), dtype=torch.float64)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return default_table(log_theta, pairs)
    assert scaling is not None
    factor = torch.tensor(float(scaling.get("factor", 1.0)), dtype=torch.float64)
    if kind == "linear":
        return default_table(log_theta, pairs) - factor.log()
    if kind == "llama3":
        low, high, original = thresholds_of(scaling)
        return llama3_table(log_theta, factor, torch.tensor(low), torch.tensor(high), original, pairs)
    return None


def thresholds_of(scaling: Any) -> tuple[float, float, float]:
    """low_freq_factor, high_freq_factor and original context of a spec's scaling, or Llama 3.1's."""
    given = scaling if isinstance(scaling, dict) else {}
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    low, high, original = (
        float(given.get(name, usual)) for name, usual in zip(names, LLAMA3_THRESHOLDS, strict=True)
    )
    return low, high, original


def explain(inv_freq: Tensor, stderr: Tensor, spec_theta: float | None, spec_scaling: Any) -> TableFit | None:
    """The simplest hypothesis within errors, or None when none is."""
    sure = (inv_freq > 0) & (stderr < SURE * inv_freq)
    if int(sure.sum()) < 2:
        return None
    measured = inv_freq.clamp_min(1e-300).log()
    sigma = torch.where(sure, torch.hypot(stderr / inv_freq.abs().clamp_min(1e-300), torch.tensor(LOG_EPS)), torch.inf)
    pairs = inv_freq.numel()
    tries = _hypotheses(measured, sigma, spec_theta, spec_scaling, pairs)
    for name, table, start, read in tries:
        found = _fitted(table, start, measured, sigma)
        if found is None:
            continue
        theta, covariance = found
        worst = float(((table(theta) - measured) / sigma).abs().max())
        if worst <= SIGMAS:
            error = covariance.diagonal().clamp_min(0).sqrt() * max(1.0, worst / 2)
            value = math.exp(float(theta[0]))
            scaling, names = read(theta)
            errors = {key: float(error[k]) * math.exp(float(theta[k])) for k, key in enumerate(names) if k > 0}
            return TableFit(
                name=name, theta=value, theta_stderr=value * float(error[0]), scaling=scaling, worst=worst,
                pairs=int(sure.sum()), stderr=errors,
            )  # fmt: skip
    return None


Read = Callable[[Tensor], tuple[Any, Sequence[str]]]
Hypothesis = tuple[str, Table, Tensor, Read]


def _hypotheses(
    measured: Tensor, sigma: Tensor, spec_theta: float | None, spec_scaling: Any, pairs: int
) -> list[Hypothesis]:
    """Named tables as functions of log parameters, start values, and how to read the parameters."""
    low, high, original = thresholds_of(spec_scaling)
    start = _start_theta(measured, sigma, pairs)
    known = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    tail = float((default_table(start, pairs) - measured)[torch.isfinite(sigma)][-1].clamp(min=0.1))

    def default(p: Tensor) -> Tensor:
        return default_table(p[0], pairs)

    def linear(p: Tensor) -> Tensor:
        return default_table(p[0], pairs) - p[1]

    def llama3(p: Tensor) -> Tensor:
        return llama3_table(p[0], p[1].exp(), torch.tensor(low), torch.tensor(high), original, pairs)

    def llama3_free(p: Tensor) -> Tensor:
        return llama3_table(p[0], p[1].exp(), p[2].exp(), p[3].exp(), original, pairs)

    first = measured[0].neg().clamp(min=0.0)
    free = torch.stack([start, torch.tensor(tail), torch.tensor(math.log(low)), torch.tensor(math.log(high))])
    out: list[Hypothesis] = [
        ("default", default, start[None], lambda p: (None, ("theta",))),
        ("linear", linear, torch.stack([start, first]),
         lambda p: ({"rope_type": "linear", "factor": math.exp(p[1])}, ("theta", "factor"))),
        ("llama3", llama3, torch.stack([start, torch.tensor(tail)]),
         lambda p: ({"rope_type": "llama3", "factor": math.exp(p[1]), **known}, ("theta", "factor"))),
        ("llama3", llama3_free, free,
         lambda p: ({"rope_type": "llama3", "factor": math.exp(p[1]), "low_freq_factor": math.exp(p[2]),
                     "high_freq_factor": math.exp(p[3]), "original_max_position_embeddings": original},
                    ("theta", "factor", "low_freq_factor", "high_freq_factor"))),
    ]  # fmt: skip
    spec_table = table_of(spec_theta, spec_scaling, pairs) if spec_theta else None
    if spec_theta and spec_table is not None:
        shift = spec_table + math.log(spec_theta) * torch.arange(pairs, dtype=torch.float64) / pairs
        out.insert(0, ("spec", lambda p: default_table(p[0], pairs) + shift,
                       torch.tensor([math.log(spec_theta)], dtype=torch.float64),
                       lambda p: (spec_scaling, ("theta",))))  # fmt: skip
    return out


def _start_theta(measured: Tensor, sigma: Tensor, pairs: int) -> Tensor:
    """log theta from the fastest pairs, which no scaling but `linear` touches; slopes only, for its sake."""
    index = torch.arange(pairs, dtype=torch.float64) / pairs
    few = torch.isfinite(sigma).nonzero()[:, 0][: max(2, pairs // 8)]
    x, y = index[few] - index[few[0]], measured[few] - measured[few[0]]
    return -(x * y).sum() / (x * x).sum().clamp_min(1e-300)


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
