"""How many noise floors are still rounding, by site.

What reaches the residual stream and the logits is held to 4. Inside a block, kernels differ by design (online
softmax, vectorised exp and tanh) and one of them may round several times more than an unusually accurate
reference; 16 is the limit there. A real error of that size still shows, because it does not stay inside.
"""

from __future__ import annotations

from parity_audit.core.report import SiteDelta
from parity_audit.core.sites import ENTERS_BLOCK, LEAVES_BLOCK

PARITY_RATIO = 4.0
INNER_RATIO = 16.0
WARN_SHARE = 0.75
TINY = 1e-300
"""Stands for a size of zero that something is divided by, so that the quotient is finite: below every size that is none."""

# By the ends of names: hooks (`hook_resid_pre`) count too, and a router's logits, whose error chooses other experts.
OUTER = (
    "embed", *ENTERS_BLOCK, "resid_mid", *LEAVES_BLOCK, "altup.combined", "ln_final.out", "logits", "returned",
)  # fmt: skip


def limit_of(site: str) -> float:
    """The largest noise ratio that counts as rounding at a site."""
    return PARITY_RATIO if site.endswith(OUTER) else INNER_RATIO


def ratio_of(delta: SiteDelta) -> float:
    """The noise ratio as a number; a site without one counts as infinitely far."""
    return float("inf") if delta.noise_ratio is None else delta.noise_ratio


def share_of_limit(delta: SiteDelta) -> float:
    """The noise ratio over what counts as rounding at that site; above 1 it does not."""
    return ratio_of(delta) / limit_of(delta.site)
