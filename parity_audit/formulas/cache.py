"""Keys and values that a decoded token finds in a cache: its row's, or what a cache lost, moved, rounded or gave to another row.

Only decoded tokens read a cache; the prompt before them runs whole.
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
    OVERRUN,
    OWN_ALONE,
    numbers_in,
)


def shown(kind: str, rows: Tensor, places: Tensor, first: int) -> Tensor:
    """Which of the keys before it a decoded token may see, `[query key]` or `[batch 1 query key]`, True where it may.

    Args:
        kind: a value of `cache.keys`.
        rows: places of the decoded tokens `[query]`.
        places: those of the keys among the tokens that are no padding, `[batch key]`.
        first: the place of the first decoded token.

    Raises:
        ValueError: no cache is described so.
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
    if kind not in (*LOST, *MOVES, *OF_ROWS, OVERRUN):
        raise ValueError(f"no cache shows `{kind}`")
    limits = {
        NOT_OWN: distance != 0, NO_PROMPT: key >= first, OWN_ALONE: (key < first) | (distance == 0),
        AS_MANY_FIRST: distance >= first, FIRST_ALONE: key < 1,
    }  # fmt: skip
    return limits.get(kind, torch.ones_like(distance, dtype=torch.bool)).expand_as(distance)


def moved(v: Tensor, kind: str, row: int) -> Tensor:
    """Values `[batch key head d_head]` as a token at place `row` finds them, which some caches have moved by a few places.

    Args:
        kind: a value of `cache.keys`.
    """
    if kind not in MOVES:
        return v
    places = int(kind.split()[3])
    return torch.cat([v[:, : row + 1].roll(places, 1), v[:, row + 1 :]], 1)


def of_rows(x: Tensor, kind: str, first: int) -> Tensor:
    """Keys or values `[batch key head d_head]` as the rows of a batch find them, which some caches give to other rows.

    Args:
        kind: a value of `cache.keys`.
        first: the place of the first decoded token.
    """
    if kind not in OF_ROWS:
        return x
    others = x[:1].expand_as(x) if kind in (FIRST_PROMPT, FIRST_ROW) else x.roll(-1, 0)
    return torch.cat([others[:, :first], x[:, first:]], 1) if kind in (NEXT_PROMPT, FIRST_PROMPT) else others


def emptied(scores: Tensor, kind: str, rows: Tensor, capacity: int) -> Tensor | None:
    """The oldest key that each query sees, `[batch head query key]`, where an empty one stands for it; None where none does.

    The empty place is among the keys from the step that fills the last one until it has moved out at the other end.

    Args:
        scores: of the queries, -inf where a key is hidden.
        kind: a value of `cache.keys`.
        rows: places of the queries of one step.
        capacity: places of the cache.
    """
    at = int(rows[-1]) - (capacity - 1)
    if kind != OVERRUN or not 0 <= at < capacity - 1:
        return None
    seen = scores.isfinite()
    return seen & (seen.cumsum(-1) == 1)


def kept(x: Tensor, dtype: str) -> Tensor:
    """Keys or values in the dtype that a cache keeps them in, and back."""
    return x if dtype == FULL else x.to(getattr(torch, dtype)).to(x)
