"""Logits from the output of the final norm.

    y = scale * (h W_U^T + b) + shift,   centred: y minus its mean over the vocabulary,   capped: cap tanh(y / cap)

Sources: tied embeddings (arXiv 1608.05859), the final soft-cap of Gemma 2 (arXiv 2408.00118), `logit_scale` of Cohere,
`logits_scaling` of Granite. TransformerLens' `center_unembed` centres the logits, which does not change the probabilities.
"""

from __future__ import annotations

from torch import Tensor

from parity_audit.formulas.caps import capped
from parity_audit.formulas.choices import FULL
from parity_audit.formulas.projections import project
from parity_audit.formulas.rounding import refuse_narrow, steps_of

CENTRED = "centred"


def logits(
    h: Tensor,
    unembed: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | str | None = None,
    shift: float | str = 0.0,
    arithmetic: str = FULL,
) -> Tensor:
    """Return the logits, `[batch pos d_vocab]`.

    Args:
        h: the final norm's output, `[batch pos d_model]`.
        unembed: `[d_vocab d_model]`.
        bias: `[d_vocab]`.
        scale: factor on the product with bias.
        softcap: bound of the logits, see `caps.capped`.
        shift: a number that is added to all logits, or "centred".
        arithmetic: `full`, or a narrow dtype followed by one of `choices.PLACES_IN_A_HEAD`.

    Raises:
        ValueError: `arithmetic` is narrow, but h fits a narrow dtype already, so its rounding could not be observed.
    """
    refuse_narrow(arithmetic, h)
    step = steps_of(arithmetic)
    product = project(step("inputs", h), step("weights", unembed), None if bias is None else step("weights", bias))
    made = scale * step("logits", product)
    made = made - made.mean(-1, keepdim=True) if shift == CENTRED else made + float(shift)
    made = capped(made, softcap)
    return step("logits behind the cap", made) if arithmetic.endswith("cap") else made
