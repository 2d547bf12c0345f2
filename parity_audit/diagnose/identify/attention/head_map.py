"""Which kv head does each query head read? (`n_kv_heads`: grouped, tiled, or something else)

The softmax over one key is 1 whatever the scores: at the first token of a sequence z[h] = v[map(h)], with no
constant in between; with a sink it is a multiple of it. So map(h) is the kv head whose v points where z[h] does, and
the angle must vanish up to rounding. Keys may be read by another map: map(h) is the kv head whose q.k correlates best
with the scores (scale and soft-cap are monotone, so they cannot change the ranking by much), or, where they are hidden,
the one whose softmax at the best of a grid of scales makes the z of the first queries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue, NotTested
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.attention.rows import Row, attention_rows, grouped, visible_scores
from parity_audit.diagnose.identify.attention.synthesis import SCALE_STEPS
from parity_audit.diagnose.thresholds import CLEAR, EXPLAINED

KNOB = "n_kv_heads"
UNCAPPED = 0.1
FIRST = 8


def fit(evidence: Evidence) -> list[Outcome]:
    """The head map as a list, one kv head per query head."""
    if evidence.layer is None:
        return []
    return [fit_map(evidence)]


def head_maps(evidence: Evidence) -> tuple[list[int], list[int]]:
    """The fitted maps for k and for v, or the grouped one where they cannot be read."""
    found = fit_map(evidence)
    value = found.value if isinstance(found, KnobFit) else None
    if isinstance(value, dict):
        return list(value["k"]), list(value["v"])
    if isinstance(value, list):
        return list(value), list(value)
    usual = grouped(evidence.dims["n_heads"], evidence.dims["n_kv_heads"])
    return usual, usual


def fit_map(evidence: Evidence) -> KnobFit | NotTested:
    """The map from the first tokens (v), and from the scores, or by synthesis where they are hidden (k)."""
    rows = list(attention_rows(evidence, evidence.short_probes()))
    distances, costs = _first_token_distances(rows), _score_costs(evidence, rows)
    from_v = None if distances is None else _from_costs(evidence, distances, len(rows), "z")
    from_k = None if costs is None else _from_costs(evidence, costs, len(rows), "attn_scores")
    if from_v is None:
        return from_k or gap(evidence, KNOB, "neither z and v nor the scores are visible")
    if not isinstance(from_v, KnobFit) or not isinstance(from_v.value, list):
        return from_v
    keys: KnobValue = None
    if isinstance(from_k, KnobFit):
        keys = from_k.value
    elif from_k is None:
        keys = keys_from_z(evidence, rows, from_v.value)
    if keys is None or keys == from_v.value:
        return from_v
    return dataclasses.replace(from_v, value={"k": keys, "v": from_v.value})


def keys_from_z(evidence: Evidence, rows: Sequence[Row], values: Sequence[int]) -> list[int] | None:
    """Which kv head's keys each head attends with, by the z they make at the best of a grid of scales."""
    usable = [row for row in rows if row.v is not None and row.z is not None and int(row.kept[0]) == 0]
    scale = evidence.spec_number("attention.scale", evidence.dims["d_head"] ** 0.5)
    chosen = []
    for head, own in enumerate(values):
        costs = {kv: _least(usable, head, kv, own, scale) for kv in range(evidence.dims["n_kv_heads"])}
        best = min(costs, key=lambda kv: costs[kv])
        if costs[best] > UNCAPPED:
            return None
        chosen.append(own if costs[own] <= CLEAR * costs[best] else best)
    return chosen


def _least(rows: Sequence[Row], head: int, kv: int, own: int, scale: float) -> float:
    """Relative rms of z of one head that the best scale leaves, over the first queries."""
    left = []
    for step in SCALE_STEPS:
        cost = size = 0.0
        for row in rows:
            assert row.v is not None
            assert row.z is not None
            n = min(row.length, FIRST)
            s = (row.q[:n, head] @ row.k[:n, kv].T) * (step / scale)
            p = torch.softmax(s.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf), -1)
            cost += float((p @ row.v[:n, own] - row.z[:n, head]).square().sum())
            size += float(row.z[:n, head].square().sum())
        left.append(cost / max(size, 1e-300))
    return math.sqrt(min(left))


def _first_token_distances(rows: list[Row]) -> Tensor | None:
    """1 - cosine^2 `[head kv_head]` between z and v at the first tokens."""
    total: Tensor | None = None
    count = 0
    for row in rows:
        if row.z is None or row.v is None or int(row.kept[0]) != 0:
            continue
        z, v = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-300) for x in (row.z[0], row.v[0]))
        along = torch.einsum("hd,gd->hg", z, v).clamp_min(0.0)
        cost = (z[:, None] - along[..., None] * v[None]).square().sum(-1)
        total, count = cost if total is None else total + cost, count + 1
    return None if total is None else total / count


def _score_costs(evidence: Evidence, rows: list[Row]) -> Tensor | None:
    """1 - correlation^2 `[head kv_head]` between scores and q.k, over visible entries."""
    sums: Tensor | None = None
    for row in rows:
        scores = visible_scores(evidence, row)
        if scores is None:
            continue
        y = torch.einsum("ihd,jgd->hgij", row.q, row.k)
        keep = torch.isfinite(scores)[:, None].expand_as(y)
        s = torch.where(keep, scores[:, None].expand_as(y).nan_to_num(neginf=0.0), 0.0)
        y = y * keep
        part = torch.stack([(s * y).sum((-1, -2)), (s * s).sum((-1, -2)), (y * y).sum((-1, -2))])
        sums = part if sums is None else sums + part
    if sums is None:
        return None
    return 1 - sums[0].clamp_min(0).square() / (sums[1] * sums[2]).clamp_min(1e-300)


def _from_costs(evidence: Evidence, costs: Tensor, n: int, site: str) -> KnobFit | NotTested:
    costs = costs.clamp_min(0.0)  # rounding may leave less than nothing
    best = costs.min(-1).values
    usual = grouped(*costs.shape)
    tied = costs[torch.arange(len(usual)), usual] <= CLEAR * best + 1e-12
    chosen = [usual[h] if bool(tied[h]) else int(costs[h].argmin()) for h in range(len(usual))]
    left = float(best.max()) ** 0.5
    if left > EXPLAINED:
        return gap(evidence, KNOB, f"no kv head explains {site}: {left:.2g} of it is left over")
    return KnobFit(
        knob=KNOB, layer=evidence.layer, value=chosen, stderr=None, residual=left, n=n, site=site,
        evidence={"distance": [[float(f"{cost:.3g}") for cost in row] for row in costs.tolist()]},
    )  # fmt: skip
