"""Whose weight and bias does a norm apply? W and B as fitted, against the checkpoint's w and b.

    W ~ s (offset + w)      s is the common factor that an unknown eps leaves open
    B ~ b                   missing where no bias is needed though b is not small

The offset is the mean of W/s - w. Where that does not explain W, the other candidates are tried: no weight at all, w
applied twice, and the weights of the other norms of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import relative_rms
from parity_audit.diagnose.identify.norm.shape import Norm, Shape
from parity_audit.diagnose.thresholds import EXPLAINED

OWN, NONE, TWICE, ANOTHER = "the checkpoint's", "none", "the checkpoint's, applied twice", "another"
MISSING, EXTRA = "missing", "not in the checkpoint"
CONSTANT = 1e-3
WHOLE = 0.01
SHOWS = 10.0


@dataclass(frozen=True, kw_only=True)
class Weight:
    """Whose weight it is, the offset with its error (None: cannot be said), and W as it should be exactly."""

    whose: str
    offset: tuple[float, float] | None
    known: Tensor | None


def whose_weight(norm: Norm, shape: Shape, others: Mapping[str, Tensor]) -> Weight:
    """The checkpoint's weight plus an offset, or what else it is."""
    if is_constant(shape.weight, shape.left):
        ones = torch.ones_like(shape.weight)
        if norm.w is None or not is_constant(norm.w, 0.0):
            return Weight(whose=NONE, offset=None, known=ones)
    if norm.w is None:
        return Weight(whose=ANOTHER, offset=None, known=None)
    offset, error, left = offset_of(shape.weight, norm.w)
    if left <= EXPLAINED:
        whole = round(offset) if abs(offset - round(offset)) < WHOLE else offset
        return Weight(whose=OWN, offset=(offset, error), known=norm.w + whole)
    for name, w in {TWICE: norm.w * norm.w, **others}.items():
        if w.shape == norm.w.shape and offset_of(shape.weight, w)[2] <= EXPLAINED:
            return Weight(whose=name, offset=None, known=None)
    return Weight(whose=ANOTHER, offset=None, known=None)


def is_constant(w: Tensor, left: float) -> bool:
    """Whether a weight is one number, up to what the fit leaves."""
    return float(w.std()) <= max(CONSTANT, left) * float(w.abs().mean())


def offset_of(weight: Tensor, w: Tensor) -> tuple[float, float, float]:
    """(offset, standard error, relative rest) of W ~ s (offset + w) `[block component]`.

    Each block has its own s, as it has its own gain; s = 1 when w is constant.
    """
    spreading = float(w.std())
    if spreading < CONSTANT * float(w.abs().max()):
        difference = weight - w
        return float(difference.mean()), float(difference.std()), relative_rms(difference - difference.mean(), weight)
    dw = w - w.mean(-1, keepdim=True)
    s = (dw * weight).sum(-1, keepdim=True) / dw.square().sum(-1, keepdim=True).clamp_min(1e-300)
    if float(s.abs().min()) < 1e-6:
        return 0.0, 0.0, 1.0
    rest = weight / s - w
    # Rounding of 1 + w is biased component by component, so the spread itself is the error, not spread/sqrt(n). It is also
    # that of s, over the spread of w: where weights hardly differ, as after a short training, an error of s moves the offset by
    # many times as much.
    lever = float(weight.div(s).mean()) / float(dw.square().mean().sqrt())
    return float(rest.mean()), float(rest.std()) * math.hypot(1.0, lever), relative_rms(rest - rest.mean(), weight / s)


def whose_bias(norm: Norm, shape: Shape) -> str | None:
    """What became of the checkpoint's bias; None where it is too small to show."""
    if norm.b is None:
        return OWN if shape.bias is None else EXTRA
    if shape.bias is None:
        size = float(norm.out.square().mean().sqrt())
        return MISSING if float(norm.b.square().mean().sqrt()) > SHOWS * shape.left * size else None
    return OWN if relative_rms(shape.bias - norm.b, norm.b) <= EXPLAINED else ANOTHER
