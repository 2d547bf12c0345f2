"""Is one tensor another with its channels in another order, and which order?

Channels are matched by what they hold: a few random projections over tokens tell them apart. The permutation p with
own[:, d] = true[:, p(d)] is then put into words: heads exchanged, axes the wrong way round, halves and alternating
channels mixed up, rolled, reversed. Where two channels hold the same, which ones hold another's is said.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.diagnose.thresholds import ALIKE, FEWEST_TOKENS, SHOWN

PROJECTIONS = 8
"""Random directions over the tokens in which channels are compared: two that differ are alike in all of them by chance alone."""
MOST_CHANNELS = 16384
"""Channels that are compared with each other: more take gigabytes."""


def order_of(own: Tensor, true: Tensor, d_head: int) -> tuple[str, Tensor] | None:
    """Words, and which channel each one holds `[channel]`; None where they hold something else. Tensors are `[token, channel]`."""
    channels = own.shape[1]
    if channels < 2 or channels > MOST_CHANNELS or len(own) < FEWEST_TOKENS:
        return None
    matched = _matched(own, true)
    if matched is None or bool((matched == torch.arange(channels)).all()):
        return None
    distinct = len(set(matched.tolist())) == channels
    return _words(matched, d_head) if distinct else _taken(matched), matched


def _matched(own: Tensor, true: Tensor) -> Tensor | None:
    generator = torch.Generator().manual_seed(0)
    waves = torch.randn(PROJECTIONS, len(own), generator=generator, dtype=torch.float64)
    a, b = (waves @ own).T, (waves @ true).T
    size = b.square().mean().sqrt()
    best = [torch.cdist(part, b).min(1) for part in torch.split(a, 1024)]
    distance, index = (torch.cat([getattr(item, name) for item in best]) for name in ("values", "indices"))
    near = ALIKE * size * PROJECTIONS**0.5
    if bool((distance > near).any()):
        return None
    stays = (a - b).norm(dim=1) <= near  # channels that are alike are in their own places
    return torch.where(stays, torch.arange(len(index)), index)


def _taken(matched: Tensor) -> str:
    """Channels that hold what others should: two channels hold the same."""
    moved = (matched != torch.arange(len(matched))).nonzero()[:, 0].tolist()
    if len(moved) > SHOWN:
        return f"{len(moved)} of {len(matched)} channels hold others"
    return ", ".join(f"channel {d} holds channel {int(matched[d])}" for d in moved)


def _words(permutation: Tensor, d_head: int) -> str:
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
    """Orders with a name: of channels, and of whole heads where a head is `d_head` of them (0: there are no heads)."""
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
