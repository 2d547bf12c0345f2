"""Positions of tokens, and which keys a query may attend to.

Positions count real tokens only, so padding on the left shifts nothing. A query sees the real tokens that are not after it
and, where there is a window w, fewer than w positions before it: 0 <= i - j < w; where the text is cut into chunks of c, those
of its own chunk: i // c = j // c. Sources: Mistral (arXiv 2310.06825), transformers modeling_llama4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.choices import (
    AGAIN,
    AND_MORE,
    AT_END,
    AT_ZERO,
    FROM_PADDING,
    HIDDEN_START,
    JUMP,
    MASKS,
    ROUNDED_TO,
    SHOW_PADDING,
    STAND_STILL,
    STANDS,
    START_AGAIN,
    STOP_AT,
    TOKEN,
    WHOLE_PREFIX,
    numbers_in,
)
from parity_audit.formulas.place import Batch
from parity_audit.formulas.rounding import NARROW, rounded


def counted(mask: Tensor) -> Tensor:
    """Positions `[batch pos]` from 0 of a mask `[batch pos]` that is 1 at real tokens; padding before them gets 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def standing(batch: Batch, said: float | str | Mapping[str, int]) -> Tensor:
    """Where tokens stand `[batch pos]`: at their positions and a number more, at one of `choices.STANDS`, of
    `choices.ROUNDED_TO` or of `ELSEWHERE` (see `choices.and_more`), or where it is said token by token. Of a run that decodes from
    a cache that is said of the decoded tokens.

    Raises:
        ValueError: no position is called so in this run.
    """
    places = batch.places
    first = batch.decoded_from
    if isinstance(said, str) and AND_MORE in said:
        words, more = said.split(AND_MORE)
        return standing(batch, words) + int(more)
    if isinstance(said, Mapping):
        moved = _one_by_one(batch.positions, said)
    elif not isinstance(said, str):
        moved = batch.positions.double() + said if isinstance(said, float) else batch.positions + said
    elif said in ROUNDED_TO:
        moved = rounded(batch.positions.double(), NARROW[ROUNDED_TO[said]]).long()
    elif said == FROM_PADDING:
        moved = places
    elif first is not None and said in STANDS:
        end = batch.positions[:, first - 1 : first]
        moved = {AGAIN: places - first, AT_ZERO: torch.zeros_like(places), AT_END: end.expand_as(places)}[said]
    else:
        moved = _elsewhere(batch.positions, said)
    return moved if first is None else torch.where(places < first, batch.positions, moved)


ELSEWHERE: dict[str, Callable[..., Tensor]] = {
    STOP_AT: lambda places, last: places.clamp_max(last),
    START_AGAIN: lambda places, last: places % (last + 1),
    JUMP: lambda places, by, token: torch.where(places >= token, places + by, places),
    STAND_STILL: lambda places, at, token: torch.where(places >= token, at, places),
}
"""What becomes of positions, by the words that say it."""


def _elsewhere(positions: Tensor, said: str) -> Tensor:
    for words, move in ELSEWHERE.items():
        numbers = numbers_in(said, words)
        if None not in numbers:
            return move(positions, *numbers)
    raise ValueError(f"no token stands at `{said}`")


def _one_by_one(positions: Tensor, said: Mapping[str, int]) -> Tensor:
    """Positions with those of single tokens instead."""
    made = positions
    for token, place in said.items():
        made = torch.where(positions == int(token.removeprefix(TOKEN)), place, made)
    return made


def visible(
    mask: Tensor,
    rows: Tensor,
    *,
    window: int | None = None,
    first: int = 0,
    chunk: int | None = None,
    kind: str = "causal",
) -> Tensor:
    """Which keys each query may attend to, `[batch 1 query key]`, True where it may.

    Args:
        mask: 1 at real tokens `[batch key]`.
        rows: places of the queries in the sequence `[query]`.
        window: how many keys a query sees, itself included; None for all of them.
        first: how many of the first tokens' keys it sees beyond its window as well (the sinks of arXiv 2309.17453).
        chunk: how many tokens stand in a chunk, outside which a query sees nothing; None for one chunk.
        kind: one of `choices.MASKS`, or one of those with a number.

    Raises:
        ValueError: no mask has this name.
    """
    prefix, hidden = (None if kind in MASKS else numbers_in(kind, words)[0] for words in (WHOLE_PREFIX, HIDDEN_START))
    if kind not in MASKS and prefix is hidden is None:
        raise ValueError(f"no mask is called `{kind}`")
    real = rearrange(mask.bool(), "batch key -> batch 1 1 key")
    distance = rows[:, None] - torch.arange(mask.shape[-1], device=rows.device)
    seen = torch.ones_like(real) if kind in SHOW_PADDING else real
    if kind not in ("not causal", "no mask"):
        seen = seen & (
            distance >= (-1 if kind == "sees one key ahead" else 1 if kind == "hides the query's own key" else 0)
        )
    near = distance < (mask.shape[-1] if window is None else window)
    if prefix is not None or hidden is not None or first or chunk is not None:
        places = counted(mask)
        query = rearrange(places[:, rows], "batch query -> batch 1 query 1")
        key = rearrange(places, "batch key -> batch 1 1 key")
        if prefix is not None:
            seen = seen | (real & (query < prefix) & (key < prefix))
        if hidden is not None:
            seen = seen & ((key >= hidden) | (query == key) | (query < hidden))
        if chunk is not None:
            seen = seen & (query // chunk == key // chunk)
        near = near | (key < first)
    return seen & near


def growth(positions: Tensor, scale: float, step: float) -> Tensor:
    """1 + scale log(1 + floor((p + 1) / step)) of positions p, of their shape: what queries far in a text are multiplied by.

    Source: scalable softmax for long contexts, as in Llama 4.
    """
    return 1.0 + scale * torch.log1p(torch.floor((positions.double() + 1.0) / step))
