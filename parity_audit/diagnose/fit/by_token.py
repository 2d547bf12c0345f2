"""The position at which each token stands, read off one token at a time, and the words for all of them.

What a position makes of a token depends on no other token, so all tokens are put at each position in turn, and each takes the one
that leaves least of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.fit.search import Difference
from parity_audit.formulas.choices import JUMP, STAND_STILL, START_AGAIN, STOP_AT, TOKEN, and_more

LENGTHS_SEARCHED = 2
"""Positions are searched up to so many times the length of a text."""


def positions_one_by_one(difference: Difference, places: Tensor, more: int = 0) -> Iterator[Any]:
    """Where tokens stand, in words and one by one; nothing where rows differ.

    Args:
        difference: formula minus capture for a value of the knob.
        places: the positions that the tokens should have `[token]`.
        more: what the model adds to them.
    """
    tried = {at: difference(STAND_STILL.format(at, 0)) for at in range(LENGTHS_SEARCHED * int(places.max() + 1))}
    left = {at: off.reshape(len(places), -1).square().sum(-1) for at, off in tried.items() if off is not None}
    if not left:
        return
    own = torch.tensor(list(left))[torch.stack(list(left.values())).argmin(0)]
    if len({*zip(places.tolist(), own.tolist(), strict=True)}) > len({*places.tolist()}):
        return
    words = where_they_stand(places, own - more)
    if words is not None:
        yield and_more(words, more)
    moved = own != places
    if more or not bool(moved.any()):
        return
    yield {f"{TOKEN}{token}": at for token, at in zip(places[moved].tolist(), own[moved].tolist(), strict=True)}


def first_wrong(off: Tensor, places: Tensor, enough: float) -> int | None:
    """The first position whose difference is more than its share of what rounding leaves; None where there is none behind the first.

    Args:
        off: formula minus capture, flat.
        places: the positions of the tokens that are compared `[token]`.
        enough: the norm that rounding leaves of all of them.
    """
    by_token = off.reshape(len(places), -1).norm(dim=-1)
    wrong = places[by_token > enough / len(places) ** 0.5]
    return int(wrong.min()) if len(wrong) and int(wrong.min()) > 0 else None


def where_it_differs(difference: Difference, places: Tensor) -> Difference:
    """The difference under a growth by position, None where that is one factor for all tokens: it says nothing of their positions.

    Args:
        difference: formula minus capture for a value of the knob.
        places: the positions of the tokens that are compared `[token]`.
    """

    def told(value: Any) -> Tensor | None:
        steps = places if value is None else (places + 1) // value["step"]
        return difference(value) if len(steps.unique()) > 1 else None

    return told


def where_they_stand(places: Tensor, own: Tensor) -> str | None:
    """Whole positions `[token]` of tokens that should stand at `places`, in words: they stop, start again, or go on otherwise. None
    where there are no words for it."""
    top = int(own.max())
    if bool((own == places.clamp_max(top)).all()):
        return STOP_AT.format(top)
    shift, wrong = own - places, own != places
    period = math.gcd(*shift[wrong].tolist())
    if bool((own == places % period).all()):
        return START_AGAIN.format(period - 1)
    first = int(places[wrong].min())
    behind = places >= first
    by, at = int(shift[behind][0]), int(own[behind][0])
    if bool((shift[behind] == by).all()):
        return JUMP.format(f"{by:+d}", first)
    if bool((own[behind] == at).all()):
        return STAND_STILL.format(at, first)
    return None
