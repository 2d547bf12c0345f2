"""What enters the first block: token embeddings, and learned positions where the architecture has them.

    embed_p     = scale * E[token_p]
    pos_embed_p = scale * P[position_p + offset]

Sources: Vaswani et al. (arXiv 1706.03762) multiply by sqrt(d_model), as Gemma does; GPT-2 learns positions; OPT leaves the
first two rows of its table out (offset 2). The factor on embeddings is a number that programs store in a dtype of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def embed(
    tokens: Tensor,
    table: Tensor,
    *,
    scale: float = 1.0,
    scale_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Token embeddings `[batch pos d_model]`.

    Args:
        tokens: ids `[batch pos]`.
        table: `[d_vocab d_model]`.
        scale: factor on every embedding.
        scale_dtype: the dtype that the factor is rounded to before it is used.
        dtype: of the result.
    """
    return functional.embedding(tokens, table).to(dtype) * torch.tensor(scale, dtype=scale_dtype).to(
        table.device, dtype
    )


def embed_positions(positions: Tensor, table: Tensor, *, offset: int = 0, scale: float = 1.0) -> Tensor:
    """Learned positions `[batch pos d_model]` of `positions [batch pos]`; the table has `offset` rows before the first."""
    return functional.embedding(positions + offset, table) * scale
