"""How heads are cut in latent attention (DeepSeek-V2, arXiv 2405.04434).

Only the last `d_rope` components of a head are rotated, and the keys of all heads share these components.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor


def end_of_queries(q: Tensor, d_rope: int) -> Tensor:
    """Return the part of the queries `[batch pos head d_head]` that is rotated, `[batch pos head d_rope]`."""
    return q[..., -d_rope:]


def end_of_keys(latent: Tensor, d_rope: int, heads: int) -> Tensor:
    """Return the rotated part of the keys, the end of the latent `[batch pos d]` for each head, `[batch pos head d_rope]`."""
    return repeat(latent[..., -d_rope:], "batch pos d_rope -> batch pos head d_rope", head=heads)


def whole_queries(q: Tensor, rotated: Tensor) -> Tensor:
    """Return the queries with their last components replaced by the rotated ones, `[batch pos head d_head]`."""
    return torch.cat([q[..., : -rotated.shape[-1]], rotated], -1)


def whole_keys(still: Tensor, rotated: Tensor) -> Tensor:
    """Return the keys, joined from the part that is not rotated and the rotated part, `[batch pos head d_head]`."""
    return torch.cat([still, rotated], -1)
