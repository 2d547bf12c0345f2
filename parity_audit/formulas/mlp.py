"""The inside of an MLP: from its two projections to what its last projection reads.

without a gate:  post = act(pre)
gated:           post = act(pre) * linear        (SwiGLU and its kin, arXiv 2002.05202)
clamped:         gpt-oss's own, see `activations.clamped_swiglu`
sparse:          act(max(pre - (mean + z std), 0)) in place of act(pre), mean and std over the components of a token, and z such
                 that a share p of a normal distribution is below it (Gemma 3n's statistical top-k, arXiv 2506.06644)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity_audit.formulas.activations import CLAMPED_ALONE, GELU_ROOT, activation, clamped_swiglu, slope_of_clamped
from parity_audit.formulas.choices import CLAMPED_PARTS


def gated(
    pre: Tensor, linear: Tensor | None, *, name: str, limit: float | None = None, clamped: str = CLAMPED_PARTS[0],
    gelu_root: float = GELU_ROOT,
) -> Tensor:  # fmt: skip
    """`[... d_mlp]` of the activated input and the linear one, both of that shape.

    Args:
        pre: what the activation is applied to (the gate's projection, or the only one).
        linear: what it is multiplied with; None in an MLP without a gate.
        name: of the activation.
        limit: where a clamped one clamps; None where it does not.
        clamped: what it clamps, one of `choices.CLAMPED_PARTS`.
        gelu_root: the constant sqrt(2/pi) of the tanh form of GELU.

    Raises:
        ValueError: no activation has this name, or a clamped one has no linear input.
    """
    slope = slope_of_clamped(name)
    if slope is not None:
        if linear is None:
            raise ValueError("a clamped SwiGLU needs a linear input")
        added = 0.0 if name == CLAMPED_ALONE else 1.0
        limit = math.inf if limit is None else limit
        return clamped_swiglu(pre, linear, slope, limit, clamped=clamped, added=added)
    made = activation(name, gelu_root)(pre)
    return made if linear is None else made * linear


def sparse(pre: Tensor, share: float | None, *, correction: int = 0) -> Tensor:
    """What is above the quantile of a normal distribution that has the mean and spread of a token's components, `[... d_mlp]`.

    Args:
        pre: of that shape.
        share: of the components that would be below if they were normal, between 0 and 1; None for all of `pre` as it is.
        correction: what is taken off the number of components in the variance.

    Raises:
        ValueError: a share that is not between 0 and 1.
    """
    if share is None:
        return pre
    if not 0.0 < share < 1.0:
        raise ValueError(f"a share of {share} is not between 0 and 1")
    quantile = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(2.0 * share - 1.0, dtype=torch.float64)))
    spread = pre.std(-1, keepdim=True, correction=correction)
    return torch.relu(pre - (pre.mean(-1, keepdim=True) + quantile * spread))
