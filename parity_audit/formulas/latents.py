"""How heads are cut in latent attention: only their end is rotated, and keys share one such end (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor


def end_of_queries(q: Tensor, d_rope: int) -> Tensor:
    """What is rotated of queries `[batch pos head d_head]`: `[batch pos head d_rope]`."""
    return q[..., -d_rope:]


def end_of_keys(latent: Tensor, d_rope: int, heads: int) -> Tensor:
    """What is rotated of keys, the end of the latent `[batch pos d]`, for each head: `[batch pos head d_rope]`."""
    return repeat(latent[..., -d_rope:], "batch pos d_rope -> batch pos head d_rope", head=heads)


def whole_queries(q: Tensor, rotated: Tensor) -> Tensor:
    """Queries with their end rotated, `[batch pos head d_head]`."""
    return torch.cat([q[..., : -rotated.shape[-1]], rotated], -1)


def whole_keys(still: Tensor, rotated: Tensor) -> Tensor:
    """Keys of the part that is not rotated, and of the end that is: `[batch pos head d_head]`."""
    return torch.cat([still, rotated], -1)
