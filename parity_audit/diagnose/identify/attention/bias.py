"""A bias on visible scores that depends on the distance alone (relative positions, a diagonal), beside a law.

    s_hij = law(q_hi.k_hj, i - j) + a_h q_hi.k_hj + b_h(i - j) + c_hi        law as in `law`

c_hi drops out of the softmax and is taken away with the mean of each query row; b_h is known up to a constant, which
is chosen so that most distances have none. Asked only where slope, soft-cap and ALiBi leave more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, relative_rms
from parity_audit.diagnose.identify.attention.law import Law, distances
from parity_audit.diagnose.identify.attention.rows import Row, dot_products, visible_scores
from parity_audit.diagnose.identify.attention.visible import Bend

KNOB = "attention.bias"
ROUNDING, LEFT, NONE = 3e-4, 0.1, 1e-3
FEW = 3


@dataclass(frozen=True, kw_only=True)
class Bias:
    """b `[head distance]`, the share of what the law leaves that is left beside it, and whether few distances have one."""

    table: Tensor
    left: float
    sparse: bool

    def away(self, scores: Tensor) -> Tensor:
        """Scores `[... head query key]` without it."""
        queries, keys = scores.shape[-2:]
        distance = (torch.arange(queries)[:, None] - torch.arange(keys)).clamp(0, self.table.shape[1] - 1)
        return scores - self.table[:, distance].to(scores)


def bias_of(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], bend: Bend) -> Bias | None:
    """The bias beside a law, where the law leaves more than rounding and a bias explains it."""
    if bend.residual <= ROUNDING:
        return None
    table, left = _by_distance(evidence, rows, heads, bend.law)
    if left >= LEFT:
        return None
    level = _without_line(table)
    sparse = len(_there(level)) <= FEW
    return Bias(table=level if sparse else table - table.median(1, keepdim=True).values, left=left, sparse=sparse)


def told(evidence: Evidence, bias: Bias | None, bend: Bend) -> KnobFit:
    """The bias in words, None for none."""
    return KnobFit(
        knob=KNOB, layer=evidence.layer, value=None if bias is None else _said(bias), stderr=None,
        residual=bend.residual, n=bend.n, site="attn_scores",
    )  # fmt: skip


def _without_line(table: Tensor) -> Tensor:
    """A table `[head distance]` less the line that most steps follow: that is ALiBi's, and most distances have nothing."""
    slope = table.diff(dim=1).median(1, keepdim=True).values
    flat = table - slope * torch.arange(table.shape[1])
    return flat - flat.median(1, keepdim=True).values


def _by_distance(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], law: Law) -> tuple[Tensor, float]:
    """b `[head distance]`, and the share of what the law leaves that is left."""
    longest = max(row.length for row in rows)
    y, s, d = [], [], []
    for row in rows:
        scores = visible_scores(evidence, row)
        if scores is None:
            continue
        at = torch.arange(row.length)
        places = (at[:, None] - at[None, :]).clamp_min(0)
        onehot = torch.nn.functional.one_hot(places, longest).double()
        seen = torch.isfinite(scores).all(0)
        products = dot_products(row, heads, at, row.length)
        y.append(_centred(products, seen))
        rest = scores - law.scores(products, distances(at, row.length))
        s.append(_centred(rest.masked_fill(~seen, 0.0), seen))
        d.append(_centred(onehot.movedim(-1, 0), seen).T)
    products, scores, distance = torch.cat(y, 1), torch.cat(s, 1), torch.cat(d)
    tables, left, before = [], 0.0, 0.0
    for own, product in zip(scores, products, strict=True):
        x = torch.cat([product[:, None], distance], 1)
        weights = torch.linalg.lstsq(x, own[:, None], driver="gelsd").solution[:, 0]
        left += float((own - x @ weights).square().sum())
        before += float(own.square().sum())
        tables.append(weights[1:])
    return torch.stack(tables), (left / max(before, 1e-300)) ** 0.5


def _centred(values: Tensor, seen: Tensor) -> Tensor:
    """Visible entries `[... entry]` of `[... query key]` less the mean of their query row."""
    weight = seen.double()
    mean = (values * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp_min(1.0)
    return (values - mean)[..., seen]


def _there(table: Tensor) -> list[int]:
    """The distances that have a bias."""
    return [int(at) for at in (table.abs().amax(0) > NONE * float(table.abs().max())).nonzero()[:, 0]]


def _said(bias: Bias) -> KnobValue:
    mean = bias.table.mean(0)
    alike = relative_rms(bias.table - mean, bias.table) < (NONE if bias.sparse else LEFT)
    if bias.sparse and alike:
        return ", ".join(f"{float(mean[at]):+.4g} at distance {at}" for at in _there(bias.table))
    return f"by distance{'' if alike else ' and head'}, up to {float(bias.table.abs().max()):.4g}"
