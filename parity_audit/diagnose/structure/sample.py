"""The input and output of a projection, and the answer to what differs from the checkpoint's weight and bias."""

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
"""Narrow dtypes, and the relative residual that rounding to them may leave: a few units in the last place."""
SHARE_LEFT = 0.2
"""The share of the residual of the checkpoint's weights that a cause may leave, where no cause leaves only rounding."""


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One matrix product of a block.

    `role` is the role of its weight, `inputs` are the sites that may show x (the first that is visible counts),
    `output` is the site of y. `heads` is the dimension that counts the heads of y. `unnormed` are further sites of x in
    a block without a norm before the projection. In a block that has a tensor with the role `unless`, the site shows
    something else than y.
    """

    role: str
    inputs: tuple[str, ...]
    output: str
    heads: str = ""
    unnormed: tuple[str, ...] = ()
    unless: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """x, y, the checkpoint's W and b (None if it has no bias), and in `p` the product x W^T without b."""

    x: Tensor
    y: Tensor
    weight: Tensor
    bias: Tensor | None
    p: Tensor

    @property
    def rest(self) -> Tensor:
        """The residual y - b - p of the checkpoint's weight and bias."""
        return self.unbiased - self.p

    @property
    def unbiased(self) -> Tensor:
        """y minus the checkpoint's bias."""
        return self.y if self.bias is None else self.y - self.bias

    @property
    def full(self) -> Tensor:
        """The product with the bias added."""
        return self.p if self.bias is None else self.p + self.bias


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The explanation of a projection: the values of its three knobs, of which one may depart from the checkpoint,
    and the residual `left`."""

    weight: KnobValue = AS_STORED
    bias: str = AS_STORED
    scale: float = 1.0
    left: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def ends_of(evidence: Evidence, source: str, target: str) -> tuple[Tensor, Tensor] | None:
    """Return the real tokens of two sites, `[token, width]`, over all short probes; None if they are not visible."""
    found = tokens_of(evidence, source, target)
    return None if found is None else (found[0].flatten(1), found[1].flatten(1))
