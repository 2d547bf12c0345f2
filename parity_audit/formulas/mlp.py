"""The inside of an MLP: from its inner projections to the input of its output projection.

without a gate:  post = act(pre)
gated:           post = act(pre) * linear        (SwiGLU and related MLPs, arXiv 2002.05202)
clamped:         gpt-oss's, see `activations.clamped_swiglu`
sparse:          act(max(pre - (mean + z std), 0)) in place of act(pre), with mean and std over the components of a token, and z the
                 quantile of a share p of the standard normal distribution (Gemma 3n's statistical top-k, arXiv 2506.06644).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity_audit.formulas.activations import CLAMPED_ALONE, GELU_ROOT, activation, clamped_swiglu, slope_of_clamped
from parity_audit.formulas.choices import CLAMPED_PARTS, FULL
from parity_audit.formulas.rounding import refuse_narrow, steps_of


def gated(
    pre: Tensor, linear: Tensor | None, *, name: str, limit: float | None = None, clamped: str = CLAMPED_PARTS[0],
    gelu_root: float = GELU_ROOT, arithmetic: str = FULL,
) -> Tensor:  # fmt: skip
    """Return the activation of `pre`, times `linear` if the MLP has a gate; all have the shape `[... d_mlp]`.

    Args:
        pre: the input of the activation (the gate's projection, or the only inner projection).
        linear: the factor on the activation; None in an MLP without a gate.
        name: the name of the activation.
        limit: the limit of a clamped activation; None for no limit.
        clamped: the inputs that a clamped activation clamps, one of `choices.CLAMPED_PARTS`.
        gelu_root: the constant sqrt(2/pi) of the tanh form of GELU.
        arithmetic: `full`, or a narrow dtype followed by one of `choices.PLACES_IN_AN_MLP`; not used for a clamped activation.

    Raises:
        ValueError: no activation has this name, a clamped activation has no linear input, or `pre` is in a narrow dtype
            already, so that rounding could not be observed.
    """
    slope = slope_of_clamped(name)
    if slope is not None:
        if linear is None:
            raise ValueError("a clamped SwiGLU needs a linear input")
        added = 0.0 if name == CLAMPED_ALONE else 1.0
        limit = math.inf if limit is None else limit
        return clamped_swiglu(pre, linear, slope, limit, clamped=clamped, added=added)
    refuse_narrow(arithmetic, pre)
    step = steps_of(arithmetic)
    made = step("activation", activation(name, gelu_root)(step("input", pre)))
    return made if linear is None else made * linear


def sparse(pre: Tensor, share: float | None, *, correction: int = 0) -> Tensor:
    """Return by how much each component exceeds a quantile of its token, and 0 if it does not, `[... d_mlp]`.

    The quantile is that of a normal distribution with the mean and the standard deviation of the token's components.

    Args:
        pre: the gate's projection, `[... d_mlp]`.
        share: the share of the normal distribution below the quantile, between 0 and 1; None returns `pre` unchanged.
        correction: the number that is subtracted from the number of components in the divisor of the variance.

    Raises:
        ValueError: the share is not between 0 and 1.
    """
    if share is None:
        return pre
    if not 0.0 < share < 1.0:
        raise ValueError(f"a share of {share} is not between 0 and 1")
    quantile = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(2.0 * share - 1.0, dtype=torch.float64)))
    spread = pre.std(-1, keepdim=True, correction=correction)
    return torch.relu(pre - (pre.mean(-1, keepdim=True) + quantile * spread))
