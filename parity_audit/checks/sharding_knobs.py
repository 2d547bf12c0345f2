"""The constant that one rank alone has wrong, read off what that rank computed from the inputs that all ranks agree on.

norm        y' / y = sqrt((m + eps) / (m + eps')) per token, with m the mean square of what is normed
attention   z' is the softmax's weighted values at another scale, for the rank's heads
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from parity_audit.checks.sharding_forms import far
from parity_audit.compare.golden import lowest
from parity_audit.core.types import KnobValue
from parity_audit.formulas.attention import scores, softmax, weighted_values

EPS, SCALE = "norm.eps", "attention.scale"
NORMED = {"ln1.out": "resid_pre", "ln2.out": "resid_mid"}
"""What goes into the norms of a block, where they stand before its sublayers."""
BESIDE = ("attention.softcap", "attention.alibi", "attention.sinks", "attention.window")
"""With these the scale is left to be read by other means."""
WIDEST = 16.0
"""How many times larger or smaller than the spec's a scale is looked for."""


def eps_of(
    found: Tensor, expected: Tensor, given: Tensor, spec: Mapping[str, KnobValue], tolerance: float
) -> float | None:
    """The eps with which a rank norms `given [token, channel]`, None where another eps is not what is wrong."""
    eps = spec.get(EPS)
    if not isinstance(eps, float):
        return None
    ratio = (found * expected).sum(-1) / expected.square().sum(-1)
    if far(ratio[:, None] * expected, found) > tolerance:
        return None
    mean = given.square().mean(-1)
    own = float(((mean + eps) / ratio.square() - mean).median())
    explained = ((mean + eps) / (mean + own)).clamp_min(0).sqrt()
    return own if own > 0 and far(explained, ratio) <= tolerance else None


def scale_of(
    found: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: slice, spec: Mapping[str, KnobValue], tolerance: float
) -> float | None:
    """The divisor of the scores with which a rank gets `found [token, head, d]` for its heads; None where no scale does."""
    usual = spec.get(SCALE)
    if not isinstance(usual, (int, float)) or usual <= 0 or any(spec.get(knob) not in (None, False) for knob in BESIDE):
        return None
    q, k, v = (part[None] for part in (q, k, v))
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[None, None]

    def distance(log: float) -> float:
        pattern = softmax(scores(q, k, seen, scale=usual * math.exp(log)))
        return far(weighted_values(pattern, v)[0, :, heads], found[:, heads])

    log = lowest(distance, -math.log(WIDEST), math.log(WIDEST))
    return usual * math.exp(log) if distance(log) <= tolerance else None
