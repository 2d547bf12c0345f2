"""How far back does a query see? The window length counts the query itself: W keys, positions i-W+1 ... i.

Scores visible: the first finite entry of each row. Hidden: synthesis. With s known from short sequences
(`law`), the output of query i if its first visible key were f is a ratio of two sums from the back,

    z(f) = (sum_{j>=f} e^{s_j} v_j) / (sum_{j>=f} e^{s_j}),

so one reverse cumulative sum gives every f at once. Squared distances to z are added up over heads and
queries in terms of W = i - f + 1; the smallest wins, and all W that explain z equally well within its own
rounding are kept as an interval, because a key with no attention mass cannot be seen to be missing. Memory is
one query of one head at a time, with a few of the d_head components.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import NotTested
from parity_audit.diagnose.evidence import Evidence, KnobFit, gap, spread
from parity_audit.diagnose.identify.attention.law import Law, distances
from parity_audit.diagnose.identify.attention.rows import Row, visible_scores
from parity_audit.diagnose.thresholds import EXPLAINED

KNOB = "attention.window"
QUERIES = 24
COMPONENTS = 32
TIE = 60.0


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The window lengths `[low, high]` that one sequence admits (high inf: no end was seen), and the best."""

    low: float
    high: float
    best: float
    residual: float
    site: str
    queries: int
    tied: int = 1


def reach_from_scores(evidence: Evidence, row: Row) -> Reach | None:
    """From the first finite score of each query; None where scores are hidden; low > high when rows disagree."""
    scores = visible_scores(evidence, row)
    if scores is None:
        return None
    seen = torch.isfinite(scores).any(0)
    first = seen.to(torch.int8).argmax(-1)
    position = torch.arange(row.length)
    lengths = (position - first + 1)[first > 0]
    longest = float((position - first + 1).max())
    if lengths.numel() == 0:
        return Reach(low=longest, high=math.inf, best=math.inf, residual=0.0, site="attn_scores", queries=row.length)
    high = float(lengths.min())
    return Reach(low=longest, high=high, best=high, residual=0.0, site="attn_scores", queries=row.length)


def reach_from_z(row: Row, heads: Sequence[int], law: Law, queries: Tensor) -> Reach | None:
    """By synthesis; None when no window length explains z."""
    if row.v is None or row.z is None:
        return None
    longest = int(queries.max()) + 1
    squares = torch.zeros(longest + 1, dtype=torch.float64)
    size = 0.0
    some = spread(row.z.shape[-1], COMPONENTS)
    v, z = row.v[..., some], row.z[..., some]
    laws = [law.head(head) for head in range(len(heads))]
    for query in queries.tolist():
        distance = distances(torch.tensor([query]), query + 1)
        for head, kv in enumerate(heads):
            s = laws[head].scores((row.k[: query + 1, kv] @ row.q[query, head])[None, None], distance)[0, 0]
            sink = float(laws[head].sink)
            squares += _squares_by_length(s, v[: query + 1, kv], z[query, head], longest, sink)
            size += float(z[query, head].square().sum())
    squares[0] = torch.inf
    best = int(squares.argmin())
    least = float(squares[best])
    if least > EXPLAINED**2 * size:
        return None
    n = queries.numel() * len(heads) * some.numel()
    admitted = (squares <= least + TIE * max(least / n, (1e-9**2) * size / n)).nonzero()[:, 0]
    high = math.inf if int(admitted.max()) == longest else float(admitted.max())
    return Reach(
        low=float(admitted.min()), high=high, best=math.inf if best == longest else float(best),
        residual=math.sqrt(least / max(size, 1e-300)), site="z", queries=queries.numel(), tied=admitted.numel(),
    )  # fmt: skip


def _squares_by_length(s: Tensor, v: Tensor, z: Tensor, longest: int, sink: float) -> Tensor:
    """|z(W) - z|^2 for W = 0 ... longest (index 0 unused); W beyond the sequence sees everything."""
    weight = torch.exp(s - s.max()).flip(0)
    mass = weight.cumsum(0) + sink * torch.exp(-s.max())
    # Nothing but tiny weights seen so far: scaling by the running maximum would be exact, a floor is enough,
    # because such a W is far from z anyway.
    mean = (weight[:, None] * v.flip(0)).cumsum(0) / mass.clamp_min(1e-300)[:, None]
    squares = (mean - z).square().sum(-1)
    tail = squares[-1].expand(longest - s.numel())
    return torch.cat([torch.zeros(1, dtype=torch.float64), squares, tail])


def late_queries(length: int) -> Tensor:
    """Mostly the last positions, where every window shorter than the sequence bites, and some earlier ones."""
    last = range(max(1, length - 3 * QUERIES), length, 3)
    return torch.tensor(sorted({*range(max(1, length // 4), length, max(1, length // 6)), *last}))


def joined(reaches: Sequence[Reach]) -> Reach | None:
    """What all sequences together admit; None when they contradict each other."""
    low = max(reach.low for reach in reaches)
    high = min(reach.high for reach in reaches)
    if low > high:
        return None
    narrow = min(reaches, key=lambda reach: (reach.high, -reach.low))
    best = narrow.best if low <= narrow.best <= high else high
    return Reach(
        low=low, high=high, best=best, residual=max(reach.residual for reach in reaches), site=narrow.site,
        queries=sum(reach.queries for reach in reaches), tied=narrow.tied,
    )  # fmt: skip


def window_fit(evidence: Evidence, reaches: Sequence[Reach]) -> KnobFit | NotTested:
    """The window as a KnobFit: None where no end was seen, with how far was looked."""
    if not reaches:
        return gap(evidence, KNOB, "no attention inputs and outputs are visible, or no window explains z")
    whole = joined(reaches)
    if whole is None:
        return gap(evidence, KNOB, "rows admit no common window length (chunked attention?)")
    value: int | None = None if math.isinf(whole.high) else int(whole.best)
    spec = evidence.spec_value(KNOB)
    if value is not None and isinstance(spec, int) and whole.low <= spec <= whole.high:
        value = spec
    return KnobFit(
        knob=KNOB, layer=evidence.layer, value=value, stderr=None, residual=whole.residual, n=whole.queries,
        site=whole.site, interval=(whole.low, whole.high),
        evidence={"keys_seen_at_least": whole.low, "keys_seen_at_most": None if value is None else whole.high},
    )  # fmt: skip
