"""Queries and keys of one side before they are rotated, whichever sites hold them.

In latent attention (DeepSeek) only the end of a head is rotated: `rot_q` and `rot_k` hold that end, `q` the whole query
before the rotation, `k` the part of a key that is not rotated, and `kv_latent` ends with what is rotated for all heads.
"""

from __future__ import annotations

from torch import Tensor

from parity_audit.diagnose.evidence import Evidence
from parity_audit.formulas import latents

ROTATED_END = "d_rope"
"""The size that a model with latent attention has."""


def before_rotation(evidence: Evidence, probe: str, name: str) -> Tensor | None:
    """What is rotated of q (or k), `[batch pos head d_rope]`; after its own norm, where there is one."""
    end = evidence.dims.get(ROTATED_END)
    if end is None:
        shown = (evidence.tensor(probe, site) for site in (f"{name}_norm.out", name))
        return next((x for x in shown if x is not None), None)
    if name == "q":
        whole = evidence.tensor(probe, "q")
        return None if whole is None else latents.end_of_queries(whole, end)
    latent = evidence.tensor(probe, "kv_latent")
    return None if latent is None else latents.end_of_keys(latent, end, evidence.dims["n_heads"])
