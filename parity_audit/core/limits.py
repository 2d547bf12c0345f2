"""How many noise floors count as rounding, by site.

At sites that reach the residual stream and the logits, the limit is 4. Inside a block, kernels differ by design (online
softmax, vectorised exp and tanh), and one of them may round several times more than an unusually accurate reference;
the limit there is 16. A real error of that size is still detected, because it does not stay inside the block.
"""

from __future__ import annotations

from parity_audit.core.report import SiteDelta
from parity_audit.core.sites import ENTERS_BLOCK, LEAVES_BLOCK

PARITY_RATIO = 4.0
INNER_RATIO = 16.0
WARN_SHARE = 0.75
TINY = 1e-300
"""Replaces a size of zero in a denominator, so that the quotient is finite; it is below every size that occurs
otherwise."""

# Ends of names, so that hooks (`hook_resid_pre`) match too, and a router's logits, whose error selects other experts.
OUTER = (
    "embed", *ENTERS_BLOCK, "resid_mid", *LEAVES_BLOCK, "altup.combined", "ln_final.out", "logits", "returned",
)  # fmt: skip


def limit_of(site: str) -> float:
    """Return the largest noise ratio that counts as rounding at a site."""
    return PARITY_RATIO if site.endswith(OUTER) else INNER_RATIO


def ratio_of(delta: SiteDelta) -> float:
    """Return the noise ratio as a number; infinite for a site without one."""
    return float("inf") if delta.noise_ratio is None else delta.noise_ratio


def share_of_limit(delta: SiteDelta) -> float:
    """Return the noise ratio relative to the limit of the site; above 1 the difference is more than rounding."""
    return ratio_of(delta) / limit_of(delta.site)
