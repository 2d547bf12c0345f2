"""Fit a constant that is wrong on one rank only, from that rank's output and the inputs on which all ranks agree.

norm        y' / y = sqrt((m + eps) / (m + eps')) per token, with m the mean square of what is normed
attention   z' is the softmax's weighted values at another scale, for the rank's heads
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from parity_audit.checks.sharding_forms import relative_error
from parity_audit.compare.golden import lowest
from parity_audit.core.types import KnobValue
from parity_audit.formulas.attention import scores, softmax, weighted_values

EPS, SCALE = "norm.eps", "attention.scale"
NORMED = {"ln1.out": "resid_pre", "ln2.out": "resid_mid"}
"""The input site of each norm of a block, for norms placed before the sublayers."""
BESIDE = ("attention.softcap", "attention.alibi", "attention.sinks", "attention.window")
"""If the spec sets one of these knobs, the scale is not fitted here, because the formula used does not include them."""
WIDEST = 16.0
"""A scale is searched between the spec's divided by this and the spec's times this."""


def eps_of(
    found: Tensor, expected: Tensor, given: Tensor, spec: Mapping[str, KnobValue], tolerance: float
) -> float | None:
    """Return the eps with which a rank normalised `given [token, channel]`; None if another eps does not explain its output."""
    eps = spec.get(EPS)
    if not isinstance(eps, float):
        return None
    ratio = (found * expected).sum(-1) / expected.square().sum(-1)
    if relative_error(ratio[:, None] * expected, found) > tolerance:
        return None
    mean = given.square().mean(-1)
    own = float(((mean + eps) / ratio.square() - mean).median())
    explained = ((mean + eps) / (mean + own)).clamp_min(0).sqrt()
    return own if own > 0 and relative_error(explained, ratio) <= tolerance else None


def scale_of(
    found: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: slice, spec: Mapping[str, KnobValue], tolerance: float
) -> float | None:
    """Return the divisor of the scores that explains `found [token, head, d]` for the rank's heads; None if no divisor does."""
    usual = spec.get(SCALE)
    if not isinstance(usual, (int, float)) or usual <= 0 or any(spec.get(knob) not in (None, False) for knob in BESIDE):
        return None
    q, k, v = (part[None] for part in (q, k, v))
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[None, None]

    def distance(log: float) -> float:
        pattern = softmax(scores(q, k, seen, scale=usual * math.exp(log)))
        return relative_error(weighted_values(pattern, v)[0, :, heads], found[:, heads])

    log = lowest(distance, -math.log(WIDEST), math.log(WIDEST))
    return usual * math.exp(log) if distance(log) <= tolerance else None
