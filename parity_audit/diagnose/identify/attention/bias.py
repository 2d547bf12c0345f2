"""A bias on visible scores that depends on the distance alone (relative positions, a diagonal), beside a law.

    s_hij = law(q_hi.k_hj, i - j) + b_h(i - j) + c_hi        law as in `law`

c_hi drops out of the softmax and is taken away with the mean of each query row; b_h is known up to a constant, which
is chosen so that most distances have none. Asked only where slope, soft-cap and ALiBi leave more than rounding.

A law that was fitted without the bias has taken a part of it for a slope and a soft-cap. So the bias is fitted beside small
changes of both (the law's derivatives), the law again without that bias, and so on until the law leaves no less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, KnobFit, TensorOf, relative_rms
from parity_audit.diagnose.identify.attention.law import Law, distances
from parity_audit.diagnose.identify.attention.rows import Row, dot_products, visible_scores
from parity_audit.diagnose.identify.attention.saturation import curve
from parity_audit.diagnose.identify.attention.visible import Bend, bend_from_scores

KNOB = "attention.bias"
ROUNDING, LEFT, NONE = 3e-4, 0.1, 1e-3
FEW = 3
ROUNDS, LESS = 6, 0.5
"""Most rounds of bias and law in turns, and the share of the residual below which a round has still gained something."""


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


def bias_of(evidence: Evidence, rows: Sequence[Row], heads: Sequence[int], bend: Bend) -> tuple[Bias | None, Bend]:
    """The bias beside a law, where the law leaves more than rounding and a bias explains it; and the law beside that bias."""
    found: Bias | None = None
    if bend.residual <= ROUNDING:
        return None, bend
    for _ in range(ROUNDS):
        table, left = _by_distance(evidence, rows, heads, bend.law)
        if left >= LEFT:
            break
        bias = _as_bias(table, left)
        again = bend_from_scores(dataclasses.replace(evidence, tensor=changed_scores(evidence, bias.away)), rows, heads)
        if again is None or (found is not None and again.residual >= bend.residual):
            break
        gained = again.residual < LESS * bend.residual
        found, bend = bias, again
        if not gained:
            break
    return found, bend


def _as_bias(table: Tensor, left: float) -> Bias:
    level = _without_line(table)
    sparse = len(_there(level)) <= FEW
    return Bias(table=level if sparse else table - table.median(1, keepdim=True).values, left=left, sparse=sparse)


def changed_scores(evidence: Evidence, change: Callable[[Tensor], Tensor | None]) -> TensorOf:
    """The evidence's tensors, its scores `[b head q k]` as `change` makes them."""

    def tensor(probe: str, site: str) -> Tensor | None:
        value = evidence.tensor(probe, site)
        return value if value is None or site != "attn_scores" else change(value)

    return tensor


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
    x, s, d = [], [], []
    for row in rows:
        scores = visible_scores(evidence, row)
        if scores is None:
            continue
        at = torch.arange(row.length)
        places = (at[:, None] - at[None, :]).clamp_min(0)
        onehot = torch.nn.functional.one_hot(places, longest).double()
        seen = torch.isfinite(scores).all(0)
        products = dot_products(row, heads, at, row.length)
        slope = law.slope[:, None, None]
        _, by_slope, by_cap = curve(slope * products, law.w)
        x.append(torch.stack([_centred(change, seen) for change in (products * by_slope, by_cap)], -1))
        rest = scores - law.scores(products, distances(at, row.length))
        s.append(_centred(rest.masked_fill(~seen, 0.0), seen))
        d.append(_centred(onehot.movedim(-1, 0), seen).T)
    changes, scores, distance = torch.cat(x, 1), torch.cat(s, 1), torch.cat(d)
    tables, left, before = [], 0.0, 0.0
    for own, change in zip(scores, changes, strict=True):
        columns = torch.cat([change / change.norm(dim=0).clamp_min(1e-300), distance], 1)
        weights = torch.linalg.lstsq(columns, own[:, None], driver="gelsd").solution[:, 0]
        left += float((own - columns @ weights).square().sum())
        before += float(own.square().sum())
        tables.append(weights[change.shape[1] :])
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
