"""The keys and values that a decoded token reads from a KV cache, also from a faulty cache.

A faulty cache loses keys, moves values against their keys, rounds both, or gives one row the keys and values of another row. Only
decoded tokens read the cache; the prompt before them is computed in one prefill.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.choices import (
    AS_MANY_FIRST,
    FIRST_ALONE,
    FIRST_PROMPT,
    FIRST_ROW,
    FULL,
    LAST_KEYS,
    LOST,
    MOVES,
    NEXT_PROMPT,
    NO_PROMPT,
    NOT_FIRST_KEYS,
    NOT_FIRST_REAL,
    NOT_OWN,
    OF_ROWS,
    OWN_ALONE,
    SHIFTED_WHEN_FULL,
    numbers_in,
)


def shown(kind: str, rows: Tensor, places: Tensor, first: int) -> Tensor:
    """Return which keys the cache shows to each decoded token: True where it does, `[query key]` or `[batch 1 query key]`.

    The causal mask is not part of it.

    Args:
        kind: a value of the knob `cache.keys`.
        rows: the places of the decoded tokens in their row, `[query]`.
        places: the positions of the keys, counted without padding, `[batch key]`.
        first: the place of the first decoded token.

    Raises:
        ValueError: `kind` is not a value of `cache.keys`.
    """
    key = rearrange(torch.arange(places.shape[1], device=rows.device), "key -> 1 key")
    distance = rearrange(rows, "query -> query 1") - key
    start, real, last = (numbers_in(kind, words)[0] for words in (NOT_FIRST_KEYS, NOT_FIRST_REAL, LAST_KEYS))
    if real is not None:
        return rearrange(places >= real, "batch key -> batch 1 1 key").expand(-1, -1, len(rows), -1)
    if start is not None:
        return (key >= start).expand_as(distance)
    if last is not None:
        return distance < last
    if kind not in (*LOST, *MOVES, *OF_ROWS, SHIFTED_WHEN_FULL):
        raise ValueError(f"no cache shows `{kind}`")
    limits = {
        NOT_OWN: distance != 0, NO_PROMPT: key >= first, OWN_ALONE: (key < first) | (distance == 0),
        AS_MANY_FIRST: distance >= first, FIRST_ALONE: key < 1,
    }  # fmt: skip
    return limits.get(kind, torch.ones_like(distance, dtype=torch.bool)).expand_as(distance)


def moved(v: Tensor, kind: str, row: int) -> Tensor:
    """Return the values `[batch key head d_head]` that the token at place `row` reads, moved by a few places if `kind` says so.

    Args:
        kind: a value of the knob `cache.keys`.
    """
    if kind not in MOVES:
        return v
    places = int(kind.split()[3])
    return torch.cat([v[:, : row + 1].roll(places, 1), v[:, row + 1 :]], 1)


def of_rows(x: Tensor, kind: str, first: int) -> Tensor:
    """Return the keys or values `[batch key head d_head]` that each row of a batch reads, those of another row if `kind` says so.

    Args:
        kind: a value of the knob `cache.keys`.
        first: the place of the first decoded token.
    """
    if kind not in OF_ROWS:
        return x
    others = x[:1].expand_as(x) if kind in (FIRST_PROMPT, FIRST_ROW) else x.roll(-1, 0)
    return torch.cat([others[:, :first], x[:, first:]], 1) if kind in (NEXT_PROMPT, FIRST_PROMPT) else others


def emptied(scores: Tensor, kind: str, rows: Tensor, capacity: int) -> Tensor | None:
    """Return where an empty cache entry takes the place of the oldest key that a query sees, `[batch head query key]`, or None.

    Only the kind `choices.OVERRUN` has such an entry. It lies among the keys from the step that fills the last place of the cache
    until it has moved out at the other end; None is returned for all other steps.

    Args:
        scores: the scores of the queries, -inf where a key is hidden.
        kind: a value of the knob `cache.keys`.
        rows: the places of the queries of one step.
        capacity: how many keys the cache can hold.
    """
    at = int(rows[-1]) - (capacity - 1)
    if kind != SHIFTED_WHEN_FULL or not 0 <= at < capacity - 1:
        return None
    seen = scores.isfinite()
    return seen & (seen.cumsum(-1) == 1)


def kept(x: Tensor, dtype: str) -> Tensor:
    """Return keys or values after a round trip through the dtype in which the cache stores them; `full` stores them unchanged."""
    return x if dtype == FULL else x.to(getattr(torch, dtype)).to(x)
