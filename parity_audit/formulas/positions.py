"""Positions of tokens, and which keys a query may attend to.

Positions count real tokens only, so padding on the left shifts nothing. The query at i sees the real tokens j that are not after it.
With a window w, they must also be fewer than w positions before it: 0 <= i - j < w. If the text is cut into chunks of c tokens, they
must be in the query's own chunk: i // c = j // c. Sources: Mistral (arXiv 2310.06825), transformers modeling_llama4.
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
    START_AGAIN,
    STOP_AT,
    TOKEN,
    WHOLE_PREFIX,
    WRONG_POSITIONS,
    numbers_in,
)
from parity_audit.formulas.place import Batch
from parity_audit.formulas.rounding import NARROW, rounded


def counted(mask: Tensor) -> Tensor:
    """Return positions `[batch pos]` from 0 for a mask `[batch pos]` that is 1 at real tokens; padding before them gets 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def assigned_positions(batch: Batch, said: float | str | Mapping[str, int]) -> Tensor:
    """Return the position that a program gives each token, `[batch pos]`. In a run with a cache, only decoded tokens are changed.

    Args:
        batch: the tokens with their right positions.
        said: a number to add to the right positions; one of `choices.STANDS`, `choices.ROUNDED_TO` or `ELSEWHERE`, which may be
            followed by a number to add (see `choices.and_more`); or a dictionary with the positions of single tokens.

    Raises:
        ValueError: these words describe no position in this run.
    """
    places = batch.places
    first = batch.decoded_from
    if isinstance(said, str) and AND_MORE in said:
        words, more = said.split(AND_MORE)
        return assigned_positions(batch, words) + int(more)
    if isinstance(said, Mapping):
        moved = _one_by_one(batch.positions, said)
    elif not isinstance(said, str):
        moved = batch.positions.double() + said if isinstance(said, float) else batch.positions + said
    elif said in ROUNDED_TO:
        moved = rounded(batch.positions.double(), NARROW[ROUNDED_TO[said]]).long()
    elif said == FROM_PADDING:
        moved = places
    elif first is not None and said in WRONG_POSITIONS:
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
"""The functions from right positions to wrong ones, by the template that names them."""


def _elsewhere(positions: Tensor, said: str) -> Tensor:
    for words, move in ELSEWHERE.items():
        numbers = numbers_in(said, words)
        if None not in numbers:
            return move(positions, *numbers)
    raise ValueError(f"no token stands at `{said}`")


def _one_by_one(positions: Tensor, said: Mapping[str, int]) -> Tensor:
    """Return the positions, with those of the single tokens that are listed replaced."""
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
    """Return which keys each query may attend to, `[batch 1 query key]`, True if it may.

    Args:
        mask: 1 at real tokens, `[batch key]`.
        rows: the places of the queries in the sequence, `[query]`.
        window: the number of keys that a query sees, itself included; None for all of them.
        first: the number of first tokens whose keys a query also sees beyond its window (the attention sinks of arXiv 2309.17453).
        chunk: the number of tokens in a chunk, outside which a query sees nothing; None for one chunk.
        kind: one of `choices.MASKS`, or `choices.WHOLE_PREFIX` or `choices.HIDDEN_START` with a number.

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
    """Return the factor on queries at positions p, 1 + scale log(1 + floor((p + 1) / step)), of the shape of the positions.

    It grows with the position. Source: scalable softmax for long contexts, as in Llama 4.
    """
    return 1.0 + scale * torch.log1p(torch.floor((positions.double() + 1.0) / step))
