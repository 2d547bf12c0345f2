"""Recognise a tensor whose channels are those of another in a different order, and describe the order in words.

Channels are matched by their contents: a few random projections over the tokens distinguish them. The permutation p
with own[:, d] = true[:, p(d)] is then put into words: heads exchanged, transposed axes, halves and alternating channels
confused, rolled, reversed. Where several channels hold the contents of one, the words list the channels that hold those
of another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.diagnose.thresholds import ALIKE, FEWEST_TOKENS, SHOWN

PROJECTIONS = 8
"""The number of random directions over the tokens in which channels are compared. Two different channels agree in
all of them only by chance."""
MOST_CHANNELS = 16384
"""The largest number of channels that are compared with each other: more take gigabytes of memory."""


def order_of(own: Tensor, true: Tensor, d_head: int) -> tuple[str, Tensor] | None:
    """Return words for the order, and for each channel the one whose contents it holds, `[channel]`; tensors are
    `[token, channel]`.

    None if some channel holds none of the true ones, if all are in their own places, or if there are too few tokens or
    channels or too many channels.
    """
    channels = own.shape[1]
    if channels < 2 or channels > MOST_CHANNELS or len(own) < FEWEST_TOKENS:
        return None
    matched = _matched(own, true)
    if matched is None or bool((matched == torch.arange(channels)).all()):
        return None
    distinct = len(set(matched.tolist())) == channels
    return _words(matched, d_head) if distinct else _taken(matched), matched


def _matched(own: Tensor, true: Tensor) -> Tensor | None:
    """Return the channel of `true` whose contents each channel of `own` holds, `[channel]`; None if some channel
    matches none."""
    generator = torch.Generator().manual_seed(0)
    waves = torch.randn(PROJECTIONS, len(own), generator=generator, dtype=torch.float64)
    a, b = (waves @ own).T, (waves @ true).T
    size = b.square().mean().sqrt()
    best = [torch.cdist(part, b).min(1) for part in torch.split(a, 1024)]
    distance, index = (torch.cat([getattr(item, name) for item in best]) for name in ("values", "indices"))
    near = ALIKE * size * PROJECTIONS**0.5
    if bool((distance > near).any()):
        return None
    stays = (a - b).norm(dim=1) <= near  # channels with equal contents count as unmoved
    return torch.where(stays, torch.arange(len(index)), index)


def _taken(matched: Tensor) -> str:
    """List the channels that hold the contents of another channel, for an order that is no permutation."""
    moved = (matched != torch.arange(len(matched))).nonzero()[:, 0].tolist()
    if len(moved) > SHOWN:
        return f"{len(moved)} of {len(matched)} channels hold others"
    return ", ".join(f"channel {d} holds channel {int(matched[d])}" for d in moved)


def _words(permutation: Tensor, d_head: int) -> str:
    """Describe a permutation of channels: of whole heads, an order with a name, or the same order in every head."""
    size = len(permutation)
    heads = permutation.view(-1, d_head) if d_head and size % d_head == 0 else permutation.view(1, -1)
    if bool((heads - heads[:, :1] == torch.arange(heads.shape[1])).all()) and bool(
        (heads[:, 0] % heads.shape[1] == 0).all()
    ):
        return f"heads {(heads[:, 0] // d_head).tolist()}"
    for words, known in known_orders(size, d_head).items():
        if bool((permutation == known).all()):
            return words
    if len(heads) > 1:
        inside = heads - d_head * torch.arange(len(heads))[:, None]
        if bool((inside == inside[:1]).all()):
            return f"the same other order in every head: {_words(inside[0], 0)}"
    return f"{int((permutation != torch.arange(size)).sum())} of {size} channels moved"


def known_orders(size: int, d_head: int) -> dict[str, Tensor]:
    """Return the orders that have a name, of channels and of whole heads; `d_head` is the channels of a head, 0 if
    there are no heads."""
    at = torch.arange(size)
    orders = {"reversed": at.flip(0)}
    if size % 2 == 0:
        orders["halves exchanged"] = at.roll(size // 2)
        orders["halves laid out alternating"] = at.view(2, -1).T.flatten()
        orders["alternating channels laid out as halves"] = at.view(-1, 2).T.flatten()
        orders["neighbours exchanged"] = at.view(-1, 2).flip(1).flatten()
    if d_head and size % d_head == 0 and size > d_head:
        orders["(d_head head) for (head d_head)"] = at.view(-1, d_head).T.flatten()
        orders["(head d_head) for (d_head head)"] = at.view(d_head, -1).T.flatten()
        orders |= {
            f"heads {words}": at.view(-1, d_head)[order].flatten()
            for words, order in known_orders(size // d_head, 0).items()
        }
    for shift in (1, -1):
        if shift % size:
            orders.setdefault(f"rolled by {shift}", at.roll(shift))
    return orders
