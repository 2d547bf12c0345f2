"""The tokens, masks and positions of a probe as tensors, the same for every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.core.types import Probe
from parity_audit.formulas.positions import counted


def tokens(probe: Probe, device: str) -> Tensor:
    """Return the token ids `[batch, pos]`."""
    return torch.tensor(probe.token_ids, dtype=torch.long, device=device)


def mask(probe: Probe, device: str) -> Tensor | None:
    """Return the attention mask `[batch, pos]` of 0 and 1, None if nothing is padded, as in a user's plain call."""
    if all(all(row) for row in probe.mask):
        return None
    return torch.tensor(probe.mask, dtype=torch.long, device=device)


def position_ids(probe: Probe, device: str) -> Tensor:
    """Return positions `[batch, pos]` that count real tokens only, so that left padding does not shift them."""
    return counted(torch.tensor(probe.mask, dtype=torch.long, device=device))
