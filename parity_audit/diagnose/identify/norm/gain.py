"""Eps, where it stands, and any common factor, from the gain of each token (W known).

    inside the root     1/g^2 = c m + eps            m = mean x^2 (of x - mu for LayerNorm)
    outside the root    1/g   = sqrt(c m) + eps
    a lower bound       1/g^2 = max(m, eps)

c is 1 in every published norm; `gain` = 1/sqrt(c) is reported, so a variance over n - 1 or a forgotten sqrt(d) shows.
Rounding moves g by a relative 1e-7 and eps by m times as much, so only tokens with small m can tell eps; the
standard error says whether they can, and includes a common relative error of the gain (the weight and the
reductions round the same way in every token), which grows with what the dtype leaves unexplained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.thresholds import CLEAR

COMMON_ERROR = 2.0**-26
COMMON_SHARE = 0.2
INSIDE, OUTSIDE, BOUND = "inside the root", "outside the root", "lower bound"
FACTOR_ERROR = 20.0
ROUNDS = 3
USUAL_SIZE = "root mean square"
OTHER_SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean absolute value": lambda size: size.mean(-1),
    "largest absolute value": lambda size: size.amax(-1),
}


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What the gains say of one form: eps with its error, the slope, and the relative scatter that is left.

    `told` is whether the other forms leave clearly more.
    """

    form: str
    eps: float
    stderr: float
    slope: float
    scatter: float
    told: bool = False

    @property
    def gain(self) -> float:
        """1/sqrt(c): the factor on the whole output."""
        return float(self.slope ** (-1.0 if self.form == OUTSIDE else -0.5))


def read_gain(m: Tensor, gain: Tensor, left: float) -> Gain:
    """The form with the least scatter; the usual one, without a factor, where they cannot be told apart.

    `m` and `gain` hold one value per token and block; `left` is what the shape of the norm leaves unexplained.
    """
    m, u = m.flatten().clamp_min(1e-300), gain.flatten().abs().clamp_min(1e-300).pow(-2)
    error = common_error(left)
    plain = [_line(m, u, INSIDE, error), _line(m, u, OUTSIDE, error), _bound(m, u, error)]
    freed = [_line(m, u, form, error, free=True) for form in (INSIDE, OUTSIDE)]
    # A free slope always leaves less: it has to leave clearly less than every form without one.
    best = min(plain, key=lambda found: found.scatter)
    chosen = plain[0] if plain[0].scatter <= CLEAR * max(best.scatter, error) else best
    factor = min(freed, key=lambda found: found.scatter)
    apart = abs(factor.slope - 1) > FACTOR_ERROR * error
    if apart and CLEAR * max(factor.scatter, error) < chosen.scatter:
        chosen = factor
    others = [found.scatter for found in plain if found.form != chosen.form]
    told = min(others) > CLEAR * max(chosen.scatter, error)
    return Gain(form=chosen.form, eps=chosen.eps, stderr=chosen.stderr, slope=chosen.slope, scatter=chosen.scatter,
                told=told)  # fmt: skip


def size_by(x: Tensor, gain: Tensor, found: Gain, left: float) -> str:
    """What a vector is divided by: another size than the usual one where it follows the gains clearly better, without
    a factor. `x` `[token block component]`, `found` what the usual size leaves."""
    error = common_error(left)
    if found.scatter <= CLEAR * error:
        return USUAL_SIZE
    sizes = {name: measure(x.abs()).unsqueeze(-1) for name, measure in OTHER_SIZES.items()}
    u = gain.flatten().abs().clamp_min(1e-300).pow(-2)
    scatter = {name: _line(size.flatten().square(), u, OUTSIDE, error).scatter for name, size in sizes.items()}
    best = min(scatter, key=lambda name: scatter[name])
    return best if CLEAR * max(scatter[best], error) < found.scatter else USUAL_SIZE


def common_error(left: float) -> float:
    """The relative error of 1/g^2 that all tokens share."""
    return 2 * max(COMMON_ERROR, COMMON_SHARE * left)


def _line(m: Tensor, u: Tensor, form: str, error: float, *, free: bool = False) -> Gain:
    """Weighted least squares of y = slope x + eps, weight 1/total^2 because the rounding error of y grows with it."""
    y, x = (u.sqrt(), m.sqrt()) if form == OUTSIDE else (u, m)
    slope, eps = 1.0, 0.0
    for _ in range(ROUNDS):  # the total holds eps, which the first round estimates
        total = slope * x + max(eps, 0.0)
        if free:
            slope, eps = _free_line(x / total, 1 / total, y / total)
        else:
            eps = float(((y - x) / total.square()).sum() / total.pow(-2).sum())
    trust = total.pow(-2)
    rest = y - slope * x - eps
    scatter = float((rest * trust).square().sum().sqrt() / trust.sum())
    common = error * float((trust * total).sum() / trust.sum())
    return Gain(form=form, eps=eps, stderr=(scatter**2 + common**2) ** 0.5, slope=max(slope, 1e-300),
                scatter=_rms(rest / total))  # fmt: skip


def _free_line(x: Tensor, one: Tensor, y: Tensor) -> tuple[float, float]:
    design = torch.stack([x, one], -1)
    scale = design.square().sum(0).sqrt()
    solved = torch.linalg.lstsq(design / scale, y[:, None]).solution[:, 0] / scale
    return float(solved[0]), float(solved[1])


def _bound(m: Tensor, u: Tensor, error: float) -> Gain:
    """1/g^2 = max(m, eps): a floor under the small tokens, and nothing above it."""
    low = u[u > 1.5 * m]
    eps = float(low.median()) if low.numel() else 0.0
    spread = float(low.std()) if low.numel() > 1 else 0.0
    return Gain(form=BOUND, eps=eps, stderr=(spread**2 + (error * eps) ** 2) ** 0.5, slope=1.0,
                scatter=_rms(u / m.clamp_min(eps) - 1))  # fmt: skip


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
