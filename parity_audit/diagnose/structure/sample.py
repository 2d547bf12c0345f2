"""A projection seen from both ends, and what may be the matter with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import Evidence, tokens_of
from parity_audit.formulas.choices import OWN

AS_STORED, NOT_STORED = OWN, "not the checkpoint's"
LOW = ((torch.bfloat16, 1e-2), (torch.float16, 1.3e-3))
"""What smaller formats may leave: a few units in the last place."""
SHARE_LEFT = 0.2
"""Share of what the checkpoint's weights leave that a cause may leave, where none leaves rounding."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One matrix product of a block: where x and y are seen (`unnormed`: in a block without a norm before it), and the
    role of its weight. y is another thing in blocks that have the tensor of the role `unless`."""

    role: str
    inputs: tuple[str, ...]
    output: str
    heads: str = ""
    unnormed: tuple[str, ...] = ()
    unless: str = ""


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
        return self.unbiased - self.p

    @property
    def unbiased(self) -> Tensor:
        """y without the checkpoint's bias."""
        return self.y if self.bias is None else self.y - self.bias

    @property
    def full(self) -> Tensor:
        """The prediction with the bias."""
        return self.p if self.bias is None else self.p + self.bias


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What explains a projection: one of the three knobs departs, or none."""

    weight: KnobValue = AS_STORED
    bias: str = AS_STORED
    scale: float = 1.0
    left: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def ends_of(evidence: Evidence, source: str, target: str) -> tuple[Tensor, Tensor] | None:
    """Real tokens of both sites, `[token, width]`, over all short probes."""
    found = tokens_of(evidence, source, target)
    return None if found is None else (found[0].flatten(1), found[1].flatten(1))
