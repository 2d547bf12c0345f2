"""Attention inputs and outputs of one sequence at a time, padding cut away.

After the cut, index = position, the causal mask is a triangle, and the same maths serves every probe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, f64, real
from parity_audit.diagnose.heads import multiplied

MASKED_BELOW = -1e30
FAR_BELOW = 5000.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence: q, z `[pos head d_head]`, k, v `[pos kv_head d_head]` in float64, tokens in order; v and z may be narrower.

    `kept` are the indices of the real tokens in the probe's row; v and z are None where hidden.
    """

    probe: str
    batch: int
    kept: Tensor
    q: Tensor
    k: Tensor
    v: Tensor | None
    z: Tensor | None

    @property
    def length(self) -> int:
        """The number of real tokens."""
        return self.q.shape[0]


def with_padding(evidence: Evidence, row: Row) -> Row:
    """The same sequence with its padding left in."""
    sites = core_of(evidence, row.probe)
    cut = {name: None if x is None else f64(x[row.batch]) for name, x in sites.items()}
    assert cut["q"] is not None
    return Row(probe=row.probe, batch=row.batch, kept=torch.arange(len(cut["q"])), **cut)  # type: ignore[arg-type]


def core_of(evidence: Evidence, probe: str) -> dict[str, Tensor | None]:
    """q, k, v and z at the attention core; q and k as projected (or normed) only in a model without rotation."""
    made = {name: multiplied(evidence, probe, name) for name in ("q", "k")}
    return made | {name: evidence.tensor(probe, name) for name in ("v", "z")}


def attention_rows(evidence: Evidence, probes: Iterator[Probe] | Sequence[Probe]) -> Iterator[Row]:
    """Every sequence of these probes whose rotated q and k are visible."""
    for probe in probes:
        sites = core_of(evidence, probe.name)
        q, k = sites["q"], sites["k"]
        if q is None or k is None:
            continue
        for batch, mask in enumerate(real(probe)):
            kept = mask.nonzero()[:, 0]
            cut = {name: None if x is None else f64(x[batch, kept]) for name, x in sites.items()}
            yield Row(probe=probe.name, batch=batch, kept=kept, **cut)  # type: ignore[arg-type]


def dot_products(row: Row, heads: Sequence[int], queries: Tensor, keys: int) -> Tensor:
    """q.k `[head query key]` of some queries with the first `keys` keys; head h reads kv head `heads[h]`."""
    return torch.einsum("ihd,jhd->hij", row.q[queries], row.k[:keys, list(heads)])


def visible_scores(evidence: Evidence, row: Row) -> Tensor | None:
    """`[head query key]` scores of a sequence, masked entries -inf; None where hidden."""
    scores = evidence.tensor(row.probe, "attn_scores")
    if scores is None:
        return None
    own = f64(scores[row.batch][:, row.kept][:, :, row.kept])
    return torch.where(seen(own), own, torch.full_like(own, -torch.inf))


def are_the_pattern(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether, of (scores, pattern), what goes by the name of scores is what the softmax made of them."""
    pairs = list(pairs)
    return bool(pairs) and all(scores.equal(pattern) for scores, pattern in pairs)


def seen(scores: Tensor) -> Tensor:
    """True where an entry is not masked: masks are -inf, the dtype's least number, or so low that e^s is 0."""
    return (scores > MASKED_BELOW) & (scores > scores.amax(-1, keepdim=True) - FAR_BELOW)


def looks_at(queries: Tensor, keys: int, window: int | None, ahead: int | None = 0) -> Tensor:
    """`[query key]` True where a query at that position sees the key.

    `window` counts the query itself; `ahead` is how many keys after itself it sees, -1: not even itself, None: all.
    """
    distance = queries[:, None] - torch.arange(keys)[None, :]
    reach = distance < (window if window is not None else keys + int(queries.max()) + 1)
    return reach if ahead is None else reach & (distance >= -ahead)


def grouped(n_heads: int, n_kv_heads: int) -> list[int]:
    """The usual map: head h reads kv head h // (n_heads / n_kv_heads) (repeat_interleave)."""
    return [head * n_kv_heads // n_heads for head in range(n_heads)]
