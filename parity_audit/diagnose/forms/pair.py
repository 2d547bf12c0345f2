"""What a site holds beside what it should hold, and a description of the difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.core.types import KnobValue


@dataclass(frozen=True, kw_only=True)
class Form:
    """A description: what kind, the value that the candidate has, the one it should have, and what is left over.

    `left` is a share of the difference (see `Pair.left`), `rest` the same of what the candidate has. `channels` and `tokens` say
    which ones differ, where they are not all.
    """

    kind: str
    value: KnobValue
    usual: KnobValue
    left: float
    channels: str = ""
    tokens: str = ""
    rest: float = math.inf

    @property
    def where(self) -> str:
        """Both in words."""
        return ", ".join(filter(None, (self.channels, self.tokens)))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """`own` and `true` `[token, channel]` in float64; `others` are sites before this one, of the same shape."""

    own: Tensor
    true: Tensor
    d_head: int
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def apart(self) -> float:
        """The size of the difference."""
        return float((self.own - self.true).norm())

    def left(self, guess: Tensor) -> float:
        """The share of the difference, or of `own` where that is less, that a guess at `own` leaves: beside a much larger `true`
        anything small would leave little of the difference."""
        return float((self.own - guess).norm()) / max(min(self.apart, float(self.own.norm())), TINY)

    def at(self, tokens: Tensor, channels: Tensor) -> Pair:
        """Only these tokens and channels."""

        def cut(x: Tensor) -> Tensor:
            return x[tokens][:, channels]

        return Pair(
            own=cut(self.own), true=cut(self.true), d_head=self.d_head,
            others={name: cut(x) for name, x in self.others.items()},
        )  # fmt: skip
