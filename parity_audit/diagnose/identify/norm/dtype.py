"""The arithmetic inside a norm: recomputed with the rounding of a narrower dtype in each place it may stand.

A norm in bfloat16 inside a float32 model leaves 1e-3 that no eps or weight explains. The recomputation whose
output agrees with the tensor clearly better than the exact one names the place. Where what goes in fits the narrow
dtype anyway, the whole run is in it and nothing can be told.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity_audit.diagnose.identify.norm.shape import Norm
from parity_audit.diagnose.identify.rounding import (
    FULL,
    NARROW,
    any_narrow,
    best_of,
    like_rounding,
    representable,
    rounded,
)
from parity_audit.formulas.norms import centred, normed


def arithmetic(norm: Norm, kind: str, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[str, dict[str, float]]:
    """ "full", or a dtype and where its rounding stands; with what each variant leaves.

    Raises:
        ValueError: the inputs fit a narrow dtype.
    """
    if any_narrow(norm.x):
        raise ValueError("the inputs are in a narrow dtype themselves")
    exact = normed(norm.x, kind, eps) * weight + _or_zero(bias)
    variants = {FULL: exact}
    for name, dtype in NARROW.items():
        variants |= {f"{name} {place}": value for place, value in _places(norm, kind, weight, bias, eps, dtype).items()}
    best, left = best_of(norm.out, variants)
    about = like_rounding(norm.out - _or_zero(bias), exact - _or_zero(bias)) if best == FULL else None
    return (f"{about} somewhere" if about else best), left


def moved_by_rounding(
    norm: Norm, kind: str, weight: Tensor, bias: Tensor | None, eps: float, read: Callable[[Tensor], float]
) -> float:
    """How far the dtype that the inputs are in moves what `read` finds in the outputs of a norm with this eps.

    The largest over the places where its rounding may stand; 0 where the inputs are in no narrow dtype. Where one channel outweighs
    all others, its rounding is the same in every token and is no noise that more tokens would average out.
    """
    places = [
        _places(norm, kind, weight, bias, eps, dtype) for dtype in NARROW.values() if representable(norm.x, dtype)
    ]
    return max((abs(read(out) - eps) for outs in places for out in outs.values()), default=0.0)


def _places(
    norm: Norm, kind: str, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    def low(x: Tensor) -> Tensor:
        return rounded(x, dtype)

    shift = _or_zero(bias)
    exact, coarse_in = normed(norm.x, kind, eps), normed(low(norm.x), kind, eps)
    centre = low(centred(low(norm.x), kind))
    root = low(low(low(centre.square()).mean(-1, keepdim=True) + eps).rsqrt())
    return {
        "out": low(exact * weight + shift),
        "before the weight": low(exact) * weight + shift,
        "weight": exact * low(weight) + low(shift),
        "in": coarse_in * weight + shift,
        "in and out": low(coarse_in * weight + shift),
        "but for the reductions": low(low(low(coarse_in) * low(weight)) + low(shift)),
        "throughout": low(low(low(centre * root) * low(weight)) + low(shift)),
    }


def _or_zero(bias: Tensor | None) -> Tensor:
    return torch.zeros(()) if bias is None else bias
