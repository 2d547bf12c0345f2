"""The residual stream: a running sum of what the sublayers add.

    sequential:  resid_mid = resid_pre + attn_out,   resid_post = resid_mid + mlp_out
    parallel:    resid_post = resid_pre + attn_out + mlp_out        (GPT-J, PaLM: arXiv 2204.02311)

What is added is what a sublayer makes, after its post-norm and times the residual multiplier where it has one.
"""

from __future__ import annotations

from torch import Tensor


def added(stream: Tensor, *parts: Tensor) -> Tensor:
    """The stream `[batch pos d_model]` with the parts, of its shape, added one after the other."""
    for part in parts:
        stream = stream + part
    return stream
