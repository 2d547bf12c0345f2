"""Activations with a parameter of their own, for ports whose constant is not a usual one.

    swish(a)            x sigmoid(a x)
    leaky_relu(a)       max(x, 0) + a min(x, 0)
    c * named           any named activation times a factor
    swiglu_clamped      (clamp(linear, -L, L) + 1) * x sigmoid(a x),   x = min(pre, L)      (gpt-oss: a = 1.702, L = 7)

a, c and L minimise what is left of post: c and the slope of leaky_relu are linear, the others are searched on a grid
that is narrowed round the best point until it no longer moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import relative_rms
from parity_audit.formulas.activations import SWISH_SLOPE, Curve, clamped_swiglu

ALPHAS = (0.1, 10.0)
LIMITS = (0.5, 30.0)
POINTS, ROUNDS, ALTERNATIONS = 9, 10, 12
SETTLED, ENOUGH = 0.99, 1e-6


def fitted_curve(pre: Tensor, linear: Tensor | None, post: Tensor, named: Mapping[str, Curve]) -> tuple[str, float]:
    """The name, with its values, of the curve that leaves least, and what it leaves."""
    gate = torch.ones_like(pre) if linear is None else linear
    found = [_swish(pre, gate, post), _leaky(pre, gate, post), *_scaled(pre, gate, post, named)]
    if linear is not None:
        found.append(_clamped(pre, linear, post))
    return min(found, key=lambda item: item[1])


def _left(made: Tensor, post: Tensor) -> float:
    return relative_rms(made - post, post)


def _swish(pre: Tensor, gate: Tensor, post: Tensor) -> tuple[str, float]:
    alpha, left = narrowed(lambda a: _left(pre * torch.sigmoid(a * pre) * gate, post), ALPHAS)
    return f"swish({alpha:.4g})", left


def _leaky(pre: Tensor, gate: Tensor, post: Tensor) -> tuple[str, float]:
    high, low = pre.clamp_min(0) * gate, pre.clamp_max(0) * gate
    slope = float(((post - high) * low).sum() / low.square().sum().clamp_min(1e-300))
    return f"leaky_relu({slope:.4g})", _left(high + slope * low, post)


def _scaled(pre: Tensor, gate: Tensor, post: Tensor, named: Mapping[str, Curve]) -> list[tuple[str, float]]:
    out = []
    for name, act in named.items():
        made = act(pre) * gate
        factor = float((made * post).sum() / made.square().sum().clamp_min(1e-300))
        out.append((f"{factor:.4g} * {name}", _left(factor * made, post)))
    return out


def _clamped(pre: Tensor, linear: Tensor, post: Tensor) -> tuple[str, float]:
    """alpha and limit in turn; a limit that nothing reaches is not named."""
    alpha, limit, left = SWISH_SLOPE, float(max(pre.max(), linear.abs().max())), 1.0
    for _ in range(ALTERNATIONS):
        before = left
        alpha, left = narrowed(lambda a, limit=limit: _left(clamped_swiglu(pre, linear, a, limit), post), ALPHAS)  # type: ignore[misc]
        limit, left = narrowed(lambda b, alpha=alpha: _left(clamped_swiglu(pre, linear, alpha, b), post), LIMITS)  # type: ignore[misc]
        if left > SETTLED * before or left < ENOUGH:
            break
    reached = bool((pre > limit).any() or (linear.abs() > limit).any())
    return f"swiglu_clamped({alpha:.4g}, {f'{limit:.4g}' if reached else 'limit not reached'})", left


def narrowed(cost: Callable[[float], float], bounds: tuple[float, float]) -> tuple[float, float]:
    """The best point of a geometric grid, narrowed round it; the cost need not be smooth."""
    low, high = bounds
    for _ in range(ROUNDS):
        grid = torch.logspace(0, 1, POINTS, dtype=torch.float64).log10() * torch.tensor(high / low).log().double()
        points = (low * grid.exp()).tolist()
        costs = [cost(point) for point in points]
        best = min(range(POINTS), key=lambda k: costs[k])
        low, high = points[max(best - 1, 0)], points[min(best + 1, POINTS - 1)]
    return points[best], costs[best]
