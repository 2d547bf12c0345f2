"""The inside of an MLP: from its two projections to what its last projection reads.

without a gate:  post = act(pre)
gated:           post = act(pre) * linear        (SwiGLU and its kin, arXiv 2002.05202)
clamped:         gpt-oss's own, see `activations.clamped_swiglu`
"""

from __future__ import annotations

from torch import Tensor

from parity_audit.formulas.activations import CLAMP, CLAMPED, GELU_ROOT, SWISH_SLOPE, activation, clamped_swiglu


def gated(
    pre: Tensor, linear: Tensor | None, *, name: str, limit: float | None = None, gelu_root: float = GELU_ROOT
) -> Tensor:  # fmt: skip
    """`[... d_mlp]` of the activated input and the linear one, both of that shape.

    Args:
        pre: what the activation is applied to (the gate's projection, or the only one).
        linear: what it is multiplied with; None in an MLP without a gate.
        name: of the activation.
        limit: where a clamped one clamps.
        gelu_root: the constant sqrt(2/pi) of the tanh form of GELU.

    Raises:
        ValueError: no activation has this name, or a clamped one has no linear input.
    """
    if name == CLAMPED:
        if linear is None:
            raise ValueError("a clamped SwiGLU needs a linear input")
        return clamped_swiglu(pre, linear, SWISH_SLOPE, CLAMP if limit is None else limit)
    made = activation(name, gelu_root)(pre)
    return made if linear is None else made * linear
