"""Attention of decoded tokens: which keys the cache shows them, in which precision, and at which scale.

The prompt runs whole and is right, so the law of attention (`law`) is read off it. The same law over the keys and
values that a cache should hold says what a decoded token's z should be. Where it is not, the ways in which caches go
wrong are tried in turn: only the last keys, not the first ones, not the token's own, values or keys that are rounded or
moved by a position. Where none explains z, a law is fitted to the decoded tokens by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parity_audit.diagnose.evidence import Evidence, KnobFit, Outcome, gap
from parity_audit.diagnose.identify.attention.hidden import best_bend
from parity_audit.diagnose.identify.attention.knobs import law_knobs
from parity_audit.diagnose.identify.attention.law import Law
from parity_audit.diagnose.identify.attention.rows import Row, attention_rows, grouped
from parity_audit.diagnose.identify.attention.synthesis import Query, queries_of, unexplained
from parity_audit.diagnose.thresholds import EXPLAINED

KEYS, DTYPE = "cache.keys", "cache.dtype"
EVERY, FULL = "every key", "full"
NO_LAW = "neither another law nor a fault of the cache explains z"
CLOSE = 1e-3
AS_WELL = 3.0
"""Times what a law leaves of the prompt: a few decoded tokens may leave so much of theirs by chance."""
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MOVES = (1, -1, 2, -2)
TIMES = 20.0
"""How many times better than full precision a rounding has to explain z."""


def fit(evidence: Evidence) -> list[Outcome]:
    """What the cache holds, and the law of the decoded tokens where that is not the prompt's."""
    if evidence.layer is None:
        return []
    rows = [row for row in attention_rows(evidence, evidence.probes) if row.v is not None and row.z is not None]
    if not rows:
        return [gap(evidence, KEYS, "rotated q and k, v and z are not all visible")]
    row, first = rows[0], evidence.probes[0].decode_from or 1
    heads = grouped(evidence.dims["n_heads"], evidence.dims["n_kv_heads"])
    window = evidence.spec_value("attention.window")
    width = int(window) if isinstance(window, (int, float)) and window else None
    bend = best_bend(evidence, [row], heads, [torch.arange(1, first)], width)
    if bend is None or bend.residual > EXPLAINED:
        return [gap(evidence, KEYS, "no law explains the prompt before the decoded tokens")]
    queries = torch.arange(first, row.length)
    tries = ((what, unexplained(parts, bend.law)) for what, parts in _held(row, heads, queries, width))
    _, whole = next(tries)
    # Where the prompt's law leaves more than rounding, decoded tokens that it explains as well are like the prompt.
    enough = max(CLOSE, bend.residual) if whole > AS_WELL * bend.residual else whole
    if whole <= enough:
        # What is wrong with the prompt's law whole runs are asked about; the reference's is there to compare with.
        law = law_knobs(evidence, bend) if evidence.side == "reference" else []
        rounded = _rounding(evidence, row, heads, queries, width, bend.law)
        return [_told(evidence, KEYS, EVERY, whole, len(queries)), rounded, *law]
    explain = [(held, left) for held, left in tries if left <= enough]
    if explain:
        return [_told(evidence, KEYS, *said_of(explain), len(queries))]
    rounded = _rounding(evidence, row, heads, queries, width, bend.law)
    if rounded.value != FULL:
        return [rounded]
    own = best_bend(evidence, [row], heads, [queries], width)
    if own is None or own.residual > EXPLAINED:
        return [gap(evidence, KEYS, NO_LAW)]
    return law_knobs(evidence, own)


def said_of(explain: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The first of what explains z about as well as anything does: moved keys and moved values may be the same fault, but a window
    one key too short explains nearly all of it where that key has hardly any weight."""
    least = min(left for _, left in explain)
    return next(item for item in explain if item[1] <= AS_WELL * least)


def last_keys(count: int) -> str:
    """What a cache shows that forgets all but its last keys: a window, where whole runs have it too."""
    return f"the last {count}"


def _held(row: Row, heads: Sequence[int], queries: Tensor, window: int | None) -> Iterator[tuple[str, list[Query]]]:
    """The attention of decoded tokens for everything a cache may hold, in words."""
    whole = queries_of(row, heads, queries, window)
    yield EVERY, [whole]
    distance, keys = whole.distance, torch.arange(whole.visible.shape[1])
    first = int(queries.min())
    limits = {"not the token's own": distance > 0, "none of the prompt": keys >= first, "none but its own after the prompt":
              (keys < first) | (distance == 0)}  # fmt: skip
    limits |= {f"not the first {count}": keys >= count for count in range(1, first)}
    limits |= {last_keys(count): distance < count for count in range(1, len(keys))}
    for what, limit in limits.items():
        yield what, [replace(whole, visible=whole.visible & limit)]
    for places in MOVES:
        for name, which in (("keys", "k"), ("values", "v"), ("keys and values", "kv")):
            rows = (_moved(row, int(query) + 1, which, places) for query in queries)
            parts = [queries_of(moved, heads, torch.tensor([moved.length - 1]), window) for moved in rows]
            yield f"{name} moved by {places:+d}", parts


def _moved(row: Row, length: int, which: str, places: int) -> Row:
    """The row up to a token, its keys or values that many positions later."""
    cut = {name: getattr(row, name)[:length] for name in ("q", "k", "v", "z")}
    return replace(row, **cut | {name: cut[name].roll(places, 0) for name in which})


def _rounding(
    evidence: Evidence, row: Row, heads: Sequence[int], queries: Tensor, window: int | None, law: Law
) -> KnobFit:  # fmt: skip
    """The precision in which z says that keys and values were kept."""

    def left(cast: Callable[[Tensor], Tensor]) -> float:
        assert row.v is not None
        return unexplained([queries_of(replace(row, k=cast(row.k), v=cast(row.v)), heads, queries, window)], law)

    plain = left(lambda x: x)
    tries = {name: left(lambda x, name=name: x.to(getattr(torch, name)).to(x)) for name in DTYPES}  # type: ignore[misc]
    best = min(tries, key=lambda name: tries[name])
    value = best if tries[best] * TIMES < plain else FULL
    return _told(evidence, DTYPE, value, min(plain, tries[best]), len(queries))


def _told(evidence: Evidence, knob: str, value: str, residual: float, n: int) -> KnobFit:
    return KnobFit(knob=knob, layer=evidence.layer, value=value, stderr=None, residual=residual, n=n, site="z")
