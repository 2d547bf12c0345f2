"""The residual stream: the running sum of the sublayers' outputs.

    sequential:  resid_mid = resid_pre + attn_out,   resid_post = resid_mid + mlp_out
    parallel:    resid_post = resid_pre + attn_out + mlp_out        (GPT-J, PaLM: arXiv 2204.02311)

A sublayer's output is added after its post-norm and times the residual multiplier, if the model has these.
"""

from __future__ import annotations

from torch import Tensor


def added(stream: Tensor, *parts: Tensor) -> Tensor:
    """Return the stream `[batch pos d_model]` plus the parts, of the same shape, added one after the other."""
    for part in parts:
        stream = stream + part
    return stream
