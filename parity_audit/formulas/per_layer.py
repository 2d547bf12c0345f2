"""Per-layer embeddings: every block has a second, small embedding of each token, used after the MLP (Gemma 3n, Gemma 4).

    e = s (norm(s_P P x) + s_T T[token])        for one block; x is the token embedding
    added = norm(U (act(G y) * e))              y is the stream after the MLP

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
    """Return e, the embedding of each token for one block, `[batch pos d_per_layer]`.

    Args:
        tokens: ids `[batch pos]`.
        table: this block's columns of the table T, `[d_vocab d_per_layer]`.
        projected: the normalised projection of the token embeddings, `[batch pos d_per_layer]`.
        table_scale: s_T, the factor on the table.
        scale: s, the factor on the sum.
        dtype: the dtype of the computation.
    """
    return (projected + torch.nn.functional.embedding(tokens, table).to(dtype) * table_scale) * scale


def gated(
    stream: Tensor, own: Tensor, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """Return U (act(G y) * e), what a block adds to the stream before the norm, `[batch pos d_model]`.

    Args:
        stream: y, `[batch pos d_model]`.
        own: e, the result of `embedded`.
        gate: G, `[d_per_layer d_model]`.
        up: U, `[d_model d_per_layer]`.
        activation: act.
    """
    return project(activation(project(stream, gate)) * own, up)
