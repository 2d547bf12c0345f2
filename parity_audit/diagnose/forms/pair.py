"""A site's tensor beside the right one (`ActualExpected`), and a description of the difference (`Description`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from parity_audit.core.limits import TINY
from parity_audit.core.types import KnobValue


@dataclass(frozen=True, kw_only=True)
class Description:
    """A description: its kind, the value that the candidate has, the usual value, and the residual that the description
    leaves.

    `share_left` is relative to the difference (see `ActualExpected.share_left`), `rest` to the norm of the candidate's whole tensor.
    `channels` and `tokens` say which ones differ; they are empty if all do.
    """

    kind: str
    value: KnobValue
    usual: KnobValue
    share_left: float
    channels: str = ""
    tokens: str = ""
    rest: float = math.inf

    @property
    def where(self) -> str:
        """The channels and tokens that differ, in words."""
        return ", ".join(filter(None, (self.channels, self.tokens)))


@dataclass(frozen=True, kw_only=True)
class ActualExpected:
    """What a site holds (`own`) and what it should hold (`true`), `[token, channel]` in float64; `others` are sites
    before it, of the same shape."""

    own: Tensor
    true: Tensor
    d_head: int
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def apart(self) -> float:
        """The norm of the difference."""
        return float((self.own - self.true).norm())

    def share_left(self, guess: Tensor) -> float:
        """Return the norm that a guess at `own` leaves, relative to the norm of the difference or of `own`, whichever
        is smaller.

        If `true` is much larger than `own`, any small guess would leave little relative to the difference.
        """
        return float((self.own - guess).norm()) / max(min(self.apart, float(self.own.norm())), TINY)

    def at(self, tokens: Tensor, channels: Tensor) -> ActualExpected:
        """Return the pair restricted to these tokens and channels, given as masks."""

        def cut(x: Tensor) -> Tensor:
            return x[tokens][:, channels]

        return ActualExpected(
            own=cut(self.own), true=cut(self.true), d_head=self.d_head,
            others={name: cut(x) for name, x in self.others.items()},
        )  # fmt: skip
