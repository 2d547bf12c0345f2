"""Which kv head does each query head read? (`n_kv_heads`: grouped, tiled, or something else)

The softmax over one key is 1 whatever the scores: at the first token of a sequence z[h] = v[map(h)], with no
constant in between. So map(h) is the kv head whose v is nearest to z[h], and the distance must vanish up
to rounding. Where z or v is hidden and the scores are visible, map(h) is the kv head whose q.k correlates
best with them (scale and soft-cap are monotone, so they cannot change the ranking by much).
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.types import NotTested
from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.attention_rows import Row, attention_rows, grouped, visible_scores

KNOB = "n_kv_heads"
EXPLAINED = 0.05
CLEAR = 4.0


def fit(evidence: Evidence) -> list[Outcome]:
    """The head map as a list, one kv head per query head."""
    if evidence.layer is None:
        return []
    return [fit_map(evidence)]


def head_map(evidence: Evidence) -> list[int]:
    """The fitted map, or the grouped one where it cannot be read."""
    found = fit_map(evidence)
    if isinstance(found, KnobFit) and isinstance(found.value, list):
        return [int(kv) for kv in found.value]
    return grouped(evidence.dims["n_heads"], evidence.dims["n_kv_heads"])


def fit_map(evidence: Evidence) -> KnobFit | NotTested:
    """The map from the first tokens, else from the scores."""
    rows = list(attention_rows(evidence, evidence.short_probes()))
    distances = _first_token_distances(rows)
    if distances is not None:
        return _from_costs(evidence, distances, len(rows), "z")
    costs = _score_costs(evidence, rows)
    if costs is not None:
        return _from_costs(evidence, costs, len(rows), "attn_scores")
    return gap(evidence, KNOB, "neither z and v nor the scores are visible")


def _first_token_distances(rows: list[Row]) -> Tensor | None:
    """Squared relative distance `[head kv_head]` between z and v at the first token."""
    total: Tensor | None = None
    size = 0.0
    for row in rows:
        if row.z is None or row.v is None or int(row.kept[0]) != 0:
            continue
        cost = (row.z[0][:, None] - row.v[0][None]).square().sum(-1)
        total = cost if total is None else total + cost
        size += float(row.v[0].square().sum(-1).mean())
    return None if total is None else total / max(size, 1e-300)


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
