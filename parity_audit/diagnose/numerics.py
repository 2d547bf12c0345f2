"""Report TF32 matrix products as a cause: they are a setting that coarsens arithmetic, and no bug of the port.

TF32 keeps 10 bits of mantissa of each factor of a product. A factor moves by up to 2^-11 of itself, a sum of products
with random signs by about that share of its size, and the errors of consecutive products add up as a random walk. So
with TF32 on, the residual stream may be off by

    4 * 2^-11 * sqrt(products passed)     (relative, about 7 products per block)

without any mistake. A larger error has another cause as well; a smaller one cannot be distinguished while TF32 is on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parity_audit.compare.floor import dtype_eps
from parity_audit.core.limits import OUTER, PARITY_RATIO
from parity_audit.core.report import Finding, SiteDelta
from parity_audit.core.types import Description, NotTested

KNOB = "numerics.tf32"
TF32_ROUNDING = dtype_eps("float16") / 2
"""Half a step of TF32, which keeps ten bits of mantissa, as float16 does."""
PRODUCTS_PER_BLOCK = 7
"""Consecutive matrix products in a block: queries, scores, values, output, gate, up, down."""


def reduced_products(about: Description, device: str, dtype: str) -> bool:
    """Whether this side's float32 products are computed with fewer bits than float32 has."""
    if dtype != "float32":
        return False
    precision = str(about.numerics.get("float32_matmul_precision", "highest"))
    if device.startswith("cuda"):
        return bool(about.numerics.get("tf32")) or precision != "highest"
    return precision == "medium"


def tf32_share(site: SiteDelta) -> float:
    """The relative error that TF32 products may cause at a site of the residual stream."""
    blocks = 1 if site.layer is None else site.layer + 1
    # The factor `PARITY_RATIO` is there because a random walk gives only a root mean square, and norms magnify small streams.
    return PARITY_RATIO * TF32_ROUNDING * math.sqrt(PRODUCTS_PER_BLOCK * blocks)


def of_that_size(sites: Sequence[SiteDelta]) -> bool:
    """Whether TF32 products explain the whole difference; only residual stream and output sites (`OUTER`) are compared,
    because sites inside blocks amplify errors."""
    deepest = max((site.layer or 0 for site in sites), default=0)
    outer = [site for site in sites if site.site.endswith(OUTER)]
    depth = math.sqrt(deepest + 1)
    return all(site.rel <= tf32_share(site) * (depth if site.layer is None else 1.0) for site in outer)


def tf32_finding(
    candidate: Description, reference: Description, sites: Sequence[SiteDelta], *, device: str, dtype: str
) -> Finding | None:
    """The finding that the candidate uses TF32; None if it multiplies in full float32."""
    if not reduced_products(candidate, device, dtype):
        return None
    worst = max(sites, key=lambda site: site.rel, default=None)
    both = reduced_products(reference, device, dtype)
    return Finding(
        knob=KNOB, kind="settings", layers=None, site=worst.site if worst else "logits", reference_value=both,
        candidate_value=True, confidence=0.95 if of_that_size(sites) else 0.6, departs_from_spec="neither",
        evidence={
            "relative_error": worst.rel if worst else 0.0, "tf32_rounding": TF32_ROUNDING,
            "float32_matmul_precision": candidate.numerics.get("float32_matmul_precision"),
        },
        message="the candidate multiplies in TF32, which keeps 10 bits of each factor: a setting, not a bug of the port",
    )  # fmt: skip


def hidden_by_tf32() -> NotTested:
    """The gap that TF32 leaves: causes that are smaller than its rounding cannot be seen."""
    why = "products in TF32 leave errors of this size by themselves; run again with TF32 off to see smaller causes"
    return NotTested(what="other causes below TF32's rounding", why=why)
