"""Where in its block a norm stands: which tensor it is the norm of.

A norm before a sublayer reads the stream, one after it what the sublayer made (OLMo 2, Gemma 2), one of the first transformers the
sum of both. Every place is tried with the shapes of `shape`: another one is the answer where it leaves next to nothing
and the usual one clearly more.
"""

from __future__ import annotations

import dataclasses

import torch

from parity_audit.diagnose.evidence import Evidence, spread, tokens_of
from parity_audit.diagnose.identify.norm.shape import Norm, best_shape

ORDER, USUAL_PLACE = "norm.order", "in its place"
EXACT, CLEARLY = 1e-3, 10.0
SUM = "after the sum (post-norm)"
PLACES: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "ln1.out": ((SUM, ("resid_pre", "attn_proj")), ("on what attention made", ("attn_proj",))),
    "ln2.out": (
        (SUM, ("resid_mid", "mlp_proj")), (SUM, ("ln1.out", "mlp_proj")), ("on what the MLP made", ("mlp_proj",)),
    ),
    "ln1_post.out": (("before attention", ("resid_pre",)), (SUM, ("resid_pre", "attn_proj"))),
    "ln2_post.out": (("before the MLP", ("resid_mid",)), (SUM, ("resid_mid", "mlp_proj"))),
}  # fmt: skip


def elsewhere(evidence: Evidence, norm: Norm, left: float) -> tuple[str, float] | None:
    """The place in words and what it leaves, where that is not the usual one, which leaves `left`."""
    if left <= EXACT / CLEARLY:
        return None
    for words, sites in PLACES.get(norm.site, ()):
        other = _reading(evidence, norm, sites)
        rest = 1.0 if other is None else best_shape(other)[0].left
        if rest <= EXACT and rest * CLEARLY < left:
            return words, rest
    return None


def _reading(evidence: Evidence, norm: Norm, sites: tuple[str, ...]) -> Norm | None:
    """The norm as if it read the sum of these sites; None where one is not visible."""
    tokens = tokens_of(evidence, *sites, norm.site)
    if tokens is None:
        return None
    *parts, y = tokens
    x = torch.stack(parts).sum(0)
    chosen = spread(len(x), len(norm.x))
    return dataclasses.replace(norm, x=x[chosen][:, None], out=y[chosen][:, None])
