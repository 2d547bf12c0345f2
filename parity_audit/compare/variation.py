"""How much of a distance the candidate's own runs of other shapes account for.

A run that is decoded, or one row of a batch, uses other kernels than the same tokens run alone in one pass. By how many
noise floors that changes a site is measured on the candidate itself. Independent errors add in squares, so the limit
for such a run grows by sqrt(1 + v^2), where v is that number. If v exceeds the limit for rounding, it is an error of
its own and the limit does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from parity_audit.core.limits import limit_of


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Multiples of the noise floor, by site: of runs decoded from the KV cache, and of rows of a batch."""

    decoded: Mapping[str, float] = field(default_factory=dict)
    batched: Mapping[str, float] = field(default_factory=dict)

    def widening(self, site: str, *, decoded: bool, batched: bool) -> float:
        """The factor by which the limit of a site grows in a run of this shape; 1 if no variation was measured."""
        own = max(self.decoded.get(site, 0.0) if decoded else 0.0, self.batched.get(site, 0.0) if batched else 0.0)
        return math.sqrt(1.0 + own * own) if own <= limit_of(site) else 1.0
