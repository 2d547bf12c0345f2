"""Per-layer embeddings: a second, small embedding of each token for every block, added behind the MLP (Gemma 3n, Gemma 4).

    e = s (norm(s_P P x) + s_T T[token])        of one block, x the token embeddings
    added = norm(U (act(G y) * e))              y the stream behind the MLP

Source: transformers modeling_gemma4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity_audit.formulas.projections import project


def embedded(
    tokens: Tensor, table: Tensor, projected: Tensor, *, table_scale: float, scale: float, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """The embedding of each token for one block, `[batch pos d_per_layer]`.

    Args:
        tokens: ids `[batch pos]`.
        table: this block's columns of the table, `[d_vocab d_per_layer]`.
        projected: what the token embeddings are projected to, normalised, `[batch pos d_per_layer]`.
        table_scale: factor on the table.
        scale: factor on the sum.
        dtype: to compute in.
    """
    return (projected + torch.nn.functional.embedding(tokens, table).to(dtype) * table_scale) * scale


def gated(
    stream: Tensor, own: Tensor, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """What a block makes of its own embeddings, before the norm, `[batch pos d_model]`.

    Args:
        stream: `[batch pos d_model]`.
        own: `embedded`.
        gate: `[d_per_layer d_model]`.
        up: `[d_model d_per_layer]`.
    """
    return project(activation(project(stream, gate)) * own, up)
