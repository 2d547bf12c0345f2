"""Logits from the final norm.

    y = scale * (h W_U^T + b) + shift,   centred: minus its mean over the vocabulary,   capped: cap tanh(y / cap)

Sources: tied embeddings (arXiv 1608.05859), the final soft-cap of Gemma 2 (arXiv 2408.00118), `logit_scale` of Cohere,
`logits_scaling` of Granite. Centring is what TransformerLens' `center_unembed` does; probabilities stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity_audit.formulas.projections import project

CENTRED = "centred"


def logits(
    h: Tensor,
    unembed: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    shift: float | str = 0.0,
) -> Tensor:
    """`[batch pos d_vocab]` of the final norm's output `[batch pos d_model]`.

    Args:
        unembed: `[d_vocab d_model]`.
        bias: `[d_vocab]`.
        scale: factor on the product.
        softcap: bound of the logits, None for no bound.
        shift: constant over the vocabulary, or "centred".
    """
    made = scale * project(h, unembed, bias)
    made = made - made.mean(-1, keepdim=True) if shift == CENTRED else made + float(shift)
    return made if softcap is None else softcap * torch.tanh(made / softcap)
