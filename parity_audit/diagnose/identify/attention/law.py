"""Attention of one layer as a formula: slope, soft-cap, ALiBi slopes and sinks.

    s_hij = g(slope_h q_hi.k_hj, w) - alibi_h (i - j)          g as in `saturation`, w = 1/cap^2
    p_hij = e^{s_hij} / (sum_j e^{s_hij} + sink_h)             sink_h = e^(sink logit), 0 where there is none

A constant per query row drops out of the softmax, so ALiBi by distance and by absolute position are one thing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.diagnose.identify.attention.saturation import curve


@dataclass(frozen=True, kw_only=True)
class Law:
    """Parameters of each head `[head]`; `w` is shared."""

    slope: Tensor
    w: float
    alibi: Tensor
    sink: Tensor

    def head(self, head: int) -> Law:
        """The same for one head."""
        at = slice(head, head + 1)
        return dataclasses.replace(self, slope=self.slope[at], alibi=self.alibi[at], sink=self.sink[at])

    def scores(self, y: Tensor, distance: Tensor) -> Tensor:
        """s `[head query key]` of q.k `[head query key]` and i - j `[query key]`."""
        bent = curve(self.slope[:, None, None] * y, self.w)[0]
        return bent - self.alibi[:, None, None] * distance

    def pattern(self, scores: Tensor, visible: Tensor) -> Tensor:
        """p `[head query key]`, 0 where not visible."""
        s = scores.masked_fill(~visible, -torch.inf)
        top = s.amax(-1, keepdim=True).clamp_min(-1e30)
        e = torch.exp(s - top)
        return e / (e.sum(-1, keepdim=True) + self.sink[:, None, None] * torch.exp(-top)).clamp_min(1e-300)


def plain(n_heads: int, slope: float, w: float) -> Law:
    """No ALiBi, no sinks, one slope."""
    zero = torch.zeros(n_heads, dtype=torch.float64)
    return Law(slope=zero + slope, w=w, alibi=zero, sink=zero)


def distances(queries: Tensor, keys: int) -> Tensor:
    """i - j `[query key]` for some query positions and the first `keys` keys."""
    return (queries[:, None] - torch.arange(keys)[None, :]).to(torch.float64)
