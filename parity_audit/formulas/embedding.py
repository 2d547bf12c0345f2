"""The input of the first block: token embeddings, and learned positions if the architecture has them.

    embed_p     = scale * E[token_p]
    pos_embed_p = scale * P[row_p]

Sources: Vaswani et al. (arXiv 1706.03762) multiply by sqrt(d_model), as Gemma does; GPT-2 learns positions; OPT does not use the
first two rows of its table (offset 2). Programs may store the factor on embeddings in another dtype than the embeddings.
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
    """Return token embeddings `[batch pos d_model]`.

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


def embed_positions(rows: Tensor, table: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return learned positions `[batch pos d_model]`, where `rows` `[batch pos]` is the row of the table for each token.

    Raises:
        ValueError: the table does not have one of the rows.
    """
    if int(rows.min()) < 0 or int(rows.max()) >= len(table):
        raise ValueError(f"a table of {len(table)} positions has no row {int(rows.min())} or {int(rows.max())}")
    return functional.embedding(rows, table) * scale
