"""Positions and masks of a probe, the same for every backend."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from parity_audit.core.types import NotTested, Probe


def tokens(probe: Probe, device: str) -> Tensor:
    """Token ids `[batch, pos]`."""
    return torch.tensor(probe.token_ids, dtype=torch.long, device=device)


def mask(probe: Probe, device: str) -> Tensor | None:
    """Attention mask `[batch, pos]` of 0 and 1, None when nothing is padded: that is the path a user takes."""
    if all(all(row) for row in probe.mask):
        return None
    return torch.tensor(probe.mask, dtype=torch.long, device=device)


def position_ids(probe: Probe, device: str) -> Tensor:
    """Positions `[batch, pos]` that count real tokens only, so that left padding does not shift them."""
    counted = torch.tensor(probe.mask, dtype=torch.long, device=device).cumsum(-1) - 1
    return counted.clamp(min=0)


def clipped(probe: Probe, limit: int | None) -> tuple[Probe, list[NotTested]]:
    """The probe's first `limit` positions, and what that leaves untested.

    A causal model's first positions do not depend on the rest, so the prefix is compared with the
    reference's own prefix. A left-padded probe cannot be clipped and is run whole.
    """
    length = probe.shape[1]
    if limit is None or length <= limit or not all(row[0] for row in probe.mask):
        return probe, []
    why = f"this port reaches {limit} positions; the probe has {length}"
    shorter = dataclasses.replace(
        probe,
        token_ids=tuple(row[:limit] for row in probe.token_ids),
        mask=tuple(row[:limit] for row in probe.mask),
    )
    return shorter, [NotTested(what=f"positions {limit} to {length - 1} of probe {probe.name}", why=why)]
