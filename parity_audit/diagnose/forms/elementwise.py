"""Recognise an MLP activation that no knob names: an unknown function f of each number of the gate's projection alone.

A gated MLP computes post = f(pre) * linear, a plain one post = f(pre). If f is one function, then numbers whose `pre` is
nearly equal have nearly equal post / linear. So the numbers are sorted by `pre`, and each is predicted by linear
interpolation between its two neighbours. For a function the prediction errors are a small share of the difference from the
right output; for a wrong order, a rounding or noise they are about as large as the difference.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from parity_audit.core.limits import TINY
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.forms.kinds import CURVES, MOST_LEFT
from parity_audit.diagnose.forms.pair import ActualExpected, Description
from parity_audit.diagnose.thresholds import CLEAN
from parity_audit.formulas.activations import NAMED, Curve

ACTIVATION = "mlp.activation"
"""The knob that these descriptions are findings of."""
SHOWN_AT = (-2.0, -1.0, 0.0, 1.0, 2.0)
"""The inputs at which an unknown activation is tabulated: between them the usual ones bend, and beyond they are straight."""


def _behind(inner: Curve, outer: Curve) -> Curve:
    """Return the function x -> outer(inner(x))."""
    return lambda x: outer(inner(x))


def _half(x: Tensor) -> Tensor:
    return x / 2


def _double(x: Tensor) -> Tensor:
    return 2 * x


OTHERS: dict[str, Curve] = {
    **CURVES,
    **{f"{name} twice": _behind(curve, curve) for name, curve in NAMED.items()},
    **{f"{name} of half its input": _behind(_half, curve) for name, curve in NAMED.items()},
    **{f"{name} of twice its input": _behind(_double, curve) for name, curve in NAMED.items()},
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "hardtanh": functional.hardtanh,
    "selu": functional.selu,
    "softsign": functional.softsign,
    "sine": torch.sin,
    "exponential": torch.exp,
}
"""Activations that configs do not name, tried by name before one is tabulated."""


def elementwise(pair: ActualExpected, pre: Tensor, linear: Tensor | None, spec: KnobValue) -> Description | None:
    """Describe an MLP's `post` as one function of `pre`, times `linear` where the MLP is gated; None if it is not one.

    Args:
        pair: what the candidate has behind its activation, and what it should have, `[token, d_mlp]`.
        pre: the gate's projection of the candidate, of the same shape.
        linear: the other projection of a gated MLP, of the same shape; None for a plain MLP.
        spec: the activation that the spec names.
    """
    factor = torch.ones_like(pre) if linear is None else linear
    for name, curve in OTHERS.items():
        left = pair.share_left(curve(pre) * factor)
        if left <= CLEAN:
            return Description(kind=ACTIVATION, value=name, usual=spec, share_left=left)
    # Dividing by a small factor magnifies rounding, so only the larger half of the factors is used.
    usable = factor.abs() >= factor.abs().median()
    x, order = pre[usable].sort()
    y, weight = (pair.own / factor)[usable][order], factor[usable][order]
    gap = (x[2:] - x[:-2]).clamp_min(TINY)
    predicted = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / gap
    error = float((weight[1:-1] * (y[1:-1] - predicted)).norm())
    left = error / max(float((pair.own - pair.true)[usable].norm()), TINY)
    if not left < MOST_LEFT:
        return None
    inside = [at for at in SHOWN_AT if float(x[0]) <= at <= float(x[-1])]
    # Two decimals are enough to recognise a function; adding 0.0 makes zero of minus zero.
    shown = np.interp(inside, x.numpy(), y.numpy()).round(2) + 0.0
    table = ", ".join(f"{value:g} at {at:g}" for value, at in zip(shown, inside, strict=True))
    return Description(kind=ACTIVATION, value=f"another function of its input ({table})", usual=spec, share_left=left)
