"""What a model returns and what a hook shows of it: the returned value counts, where it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from parity_audit.compare.source import TensorSource
from parity_audit.core.sites import LOGITS, RETURNED
from parity_audit.core.types import NotTested

OUTPUTS = (LOGITS, RETURNED)
BY_HOOKS_ALONE = NotTested(
    what="the value that the model returns", why="it was not captured: the logits are those that a hook shows"
)


class OfSite(Protocol):
    """Something about one site on one probe."""

    @property
    def site(self) -> str:
        """The site."""

    @property
    def probe(self) -> str:
        """The probe's name."""


Item = TypeVar("Item", bound=OfSite)


def decide(items: Sequence[Item]) -> Iterator[Item]:
    """Those that a verdict rests on: hooked logits give way to what the model returned on the same probe."""
    returned = {item.probe for item in items if item.site == RETURNED}
    return (item for item in items if item.site != LOGITS or item.probe not in returned)


def returns_what_is_hooked(sides: Iterable[TensorSource], probe: str) -> bool:
    """Whether no bit of what each side returned differs from its hooked logits, so that one comparison does for both."""
    return all(_same(side, probe) for side in sides)


def _same(side: TensorSource, probe: str) -> bool:
    if not side.sites(probe).issuperset(OUTPUTS):
        return False
    hooked, returned = (side.digest(probe, site) for site in OUTPUTS)
    return hooked == returned != ""
