"""A projection seen from both ends, and what may be the matter with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, f64, real

AS_STORED, NOT_STORED = "the checkpoint's", "not the checkpoint's"
CLEAN = 2e-5  # what float32 rounding may leave of a projection, relative
LOW = ((torch.bfloat16, 1e-2), (torch.float16, 1.3e-3))  # and what smaller formats may: a few units in the last place
EXPLAINS = 0.2  # a cause must leave less than this share of what no cause leaves


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One matrix product of a block: where x and y are seen (`unnormed`: in a block without a norm before it), and the
    role of its weight."""

    role: str
    inputs: tuple[str, ...]
    output: str
    heads: str = ""
    unnormed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """x, y, the checkpoint's W and b (None where it has none), and the prediction without b."""

    x: Tensor
    y: Tensor
    weight: Tensor
    bias: Tensor | None
    p: Tensor

    @property
    def rest(self) -> Tensor:
        """What the checkpoint's weight and bias leave of y."""
        return self.y - self.p if self.bias is None else self.y - self.p - self.bias


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What explains a projection: one of the three knobs departs, or none."""

    weight: KnobValue = AS_STORED
    bias: str = AS_STORED
    scale: float = 1.0
    left: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def tokens_of(evidence: Evidence, source: str, target: str) -> tuple[Tensor, Tensor] | None:
    """Real tokens of both sites, `[token, width]`, over all short probes."""
    pairs = []
    for probe in evidence.short_probes():
        sites = [evidence.tensor(probe.name, site) for site in (source, target)]
        if None not in sites:
            kept = real(probe)
            pairs.append([f64(site[kept]).flatten(1) for site in sites if site is not None])
    if not pairs:
        return None
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
