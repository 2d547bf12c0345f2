"""Describe in words how a component's output differs from the right one, where no constant of the spec explains it.

The judge replays the candidate's own inputs, so `true` is what a site should hold and `own` what it holds, both
`[token, channel]`. The finding is the simplest of these descriptions that turns `true` into `own`:

    another site's values, or a sum of such   own = sum_s b_s site_s
    constant                                  own = c, or one vector
    rounded                                   own = round(true) in a narrow dtype, or to its grid times a scale
    scale, shift                              own = a true,  own = true + b
    clamp, softcap                            own = min(max(true, lo), hi),  own = c tanh(true / c)
    curve                                     own = f(true), f a usual activation, or a softmax over a token
    position                                  own_t = true_(t - 1), or of another token near by
    order                                     own = true with its channels permuted
    gain, bias                                own = g_d true,  own = true + b_d     (per channel)
    norm                                      own = s_n true, or s_n (true - mean)  (per token, or per token and head)
    hidden                                    own = one very low number in place of all but the k largest of each token
    projection                                own = true - true V^T V for the few directions V of the difference

Where only some tokens or channels differ, the others are left out, and the description names those that differ. A
description counts if it leaves less than the share `MOST_LEFT` of the difference; otherwise the component stays
unexplained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.diagnose.forms.kinds import FEW_NUMBERS, MANY_NUMBERS, MOST_LEFT, Maker, clamped, hidden, ordered
from parity_audit.diagnose.forms.pair import ActualExpected, Description
from parity_audit.diagnose.thresholds import CLEAN, CLEARLY_MORE, MAJORITY, NEARLY_ALL, SHOWN


def described(pair: ActualExpected) -> Description | None:
    """Return the first description that fits, None if none does. Tensors that do not differ have no description."""
    return next(descriptions(pair), None)


def descriptions(pair: ActualExpected) -> Iterator[Description]:
    """Yield every description that fits, the simplest first. Of those with a number or two, the ones with the
    smallest residuals come first."""
    scale = max(float(pair.true.norm()), float(pair.own.norm()))
    gone = hidden(pair)
    if gone is not None and gone.share_left < CLEAN:
        yield _with_rest(gone, pair, pair)
        return
    if pair.apart <= CLEAN * scale or not bool(torch.isfinite(pair.own).all() & torch.isfinite(pair.true).all()):
        return
    moved = ordered(pair)  # uses all channels, also those in their own places
    if moved is not None and moved.share_left < MOST_LEFT:
        yield _with_rest(moved, pair, pair)
    part, channels, tokens = _where_it_differs(pair)
    plain = list(_fitting(FEW_NUMBERS, part))
    least = CLEARLY_MORE * min((form.share_left for form in plain), default=0.0)
    bounds = next(_fitting([clamped], pair), None)
    for form in (*sorted(plain, key=lambda form: form.share_left > max(least, CLEAN)), *_fitting(MANY_NUMBERS, part)):
        if bounds is not None and form.kind == bounds.kind:
            yield _with_rest(bounds, pair, pair)  # bounds determine which entries change
            continue
        yield dataclasses.replace(_with_rest(form, part, pair), channels=channels, tokens=tokens)


def _with_rest(form: Description, part: ActualExpected, pair: ActualExpected) -> Description:
    """Return a description of a part with `rest` set: what it leaves of that part, relative to the norm of the
    candidate's whole tensor."""
    return dataclasses.replace(form, rest=form.share_left * part.apart / max(float(pair.own.norm()), TINY))


def _fitting(makers: Iterable[Maker], pair: ActualExpected) -> Iterator[Description]:
    for maker in makers:
        form = maker(pair)
        if form is not None and form.share_left < MOST_LEFT:
            yield form


def _where_it_differs(pair: ActualExpected) -> tuple[ActualExpected, str, str]:
    """Return the pair restricted to the channels and tokens that differ, and words for each of these; empty words
    mean all."""
    wrong = (pair.own - pair.true).abs() > 1e-4 * pair.true.square().mean().sqrt()
    tokens, channels = wrong.any(1), _whole_heads(wrong.any(0), pair.d_head)
    some_channels, some_tokens = (int(some.sum()) < NEARLY_ALL * len(some) for some in (channels, tokens))
    said = _channels(channels, pair.d_head) if some_channels else ""
    part = pair.at(
        tokens if some_tokens else torch.ones_like(tokens), channels if some_channels else torch.ones_like(channels)
    )
    return part, said, f"{int(tokens.sum())} of {len(tokens)} tokens" if some_tokens else ""


def _whole_heads(wrong: Tensor, d_head: int) -> Tensor:
    """Return a mask of channels, extended to whole heads if in each head either most of the channels differ or none
    does."""
    if not d_head or len(wrong) % d_head:
        return wrong
    share = wrong.view(-1, d_head).double().mean(1)
    return (share > 0).repeat_interleave(d_head) if bool(((share == 0) | (share >= MAJORITY)).all()) else wrong


def _channels(wrong: Tensor, d_head: int) -> str:
    """Return channels in words: one channel, a few, a range, or whole heads."""
    found = [int(i) for i in wrong.nonzero()[:, 0]]
    if d_head and len(wrong) % d_head == 0:
        by_head = wrong.view(-1, d_head)
        if bool((by_head.all(1) | ~by_head.any(1)).all()):
            return f"heads {', '.join(str(int(i)) for i in by_head.any(1).nonzero()[:, 0])}"
    if len(found) == 1:
        return f"channel {found[0]}"
    if found == list(range(found[0], found[-1] + 1)):
        return f"channels {found[0]} to {found[-1]}"
    return f"channels {', '.join(map(str, found))}" if len(found) <= SHOWN else f"{len(found)} of {len(wrong)} channels"
