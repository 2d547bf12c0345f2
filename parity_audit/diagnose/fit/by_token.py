"""Fit the position at which each token stands, and describe the positions of all tokens in words.

The effect of a position on a token depends on no other token. So all tokens are put at each candidate position in turn,
and each token takes the position with its smallest residual.
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
"""Positions are searched up to this many times the length of a text."""


def positions_one_by_one(difference: Difference, places: Tensor, more: int = 0) -> Iterator[Any]:
    """Yield descriptions of where the tokens stand: in words where words fit, and as a dictionary with the position of
    each moved token.

    Nothing is yielded where the position cannot be computed, or where rows of the batch give one token different
    positions. The dictionary is yielded only if the model adds nothing to positions and some token is moved.

    Args:
        difference: formula minus capture for a value of the knob.
        places: the positions that the tokens should have, `[token]`.
        more: the number that the model adds to positions.
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
    """Return the first position whose difference exceeds its share of the rounding; None if there is none, or if it is
    position 0.

    Args:
        off: formula minus capture, flat.
        places: the positions of the compared tokens, `[token]`.
        enough: the norm that rounding may have over all of these tokens together.
    """
    by_token = off.reshape(len(places), -1).norm(dim=-1)
    wrong = places[by_token > enough / len(places) ** 0.5]
    return int(wrong.min()) if len(wrong) and int(wrong.min()) > 0 else None


def where_it_differs(difference: Difference, places: Tensor) -> Difference:
    """Restrict the difference of a growth by position to values under which tokens get different factors.

    The returned function gives None for a step with which all compared tokens have one factor: such a value cannot show
    an effect of the position.

    Args:
        difference: formula minus capture for a value of the knob.
        places: the positions of the compared tokens, `[token]`.
    """

    def told(value: Any) -> Tensor | None:
        steps = places if value is None else (places + 1) // value["step"]
        return difference(value) if len(steps.unique()) > 1 else None

    return told


def where_they_stand(places: Tensor, own: Tensor) -> str | None:
    """Describe in words the whole-number positions `own` `[token]` of tokens that should stand at `places`; None if no
    rule fits.

    The rules are: positions stop at a largest one, start again after a period, jump by a number from one token on, or
    stand still from one token on.
    """
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
