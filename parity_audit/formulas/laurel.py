"""A learned low-rank residual beside attention (Gemma 3n): both are added to the stream, and the sum is scaled.

    laurel = y + norm(R (L y))                 y is the input of attention; R L has low rank
    resid_mid = s (x + attention + laurel)     x is the stream, whose norm is y; s = 1 / sqrt(2)

Sources: LAUREL (arXiv 2411.07501), transformers modeling_gemma3n.py.
"""

from __future__ import annotations

from torch import Tensor

from parity_audit.formulas.projections import project


def low_rank(y: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return R (L y), `[batch pos d_model]`.

    Args:
        y: `[batch pos d_model]`.
        left: L, `[rank d_model]`.
        right: R, `[d_model rank]`.
    """
    return project(project(y, left), right)
