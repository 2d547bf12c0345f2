"""Queries and keys of one side as attention multiplies them, whichever sites hold their parts.

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


def multiplied(evidence: Evidence, probe: str, name: str) -> Tensor | None:
    """q (or k) of the scores, `[batch pos head d_head]`; before the rotation only in a model that has none."""
    rotated, end = evidence.tensor(probe, f"rot_{name}"), evidence.dims.get(ROTATED_END)
    if end is not None:
        still = evidence.tensor(probe, name)
        if rotated is None or still is None:
            return None
        return (latents.whole_queries if name == "q" else latents.whole_keys)(still, rotated.to(still))
    rotates = any(knob.startswith("rope.") for knob in evidence.knobs)
    return rotated if rotates or rotated is not None else before_rotation(evidence, probe, name)
