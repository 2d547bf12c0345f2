"""The returned value of a model and its logits hook: the returned value decides where it was captured."""

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
    """An item that concerns one site on one probe."""

    @property
    def site(self) -> str:
        """The site."""

    @property
    def probe(self) -> str:
        """The probe's name."""


Item = TypeVar("Item", bound=OfSite)


def deciding_items(items: Sequence[Item]) -> Iterator[Item]:
    """The items that decide a verdict: hooked logits are left out on probes where the returned value was captured."""
    returned = {item.probe for item in items if item.site == RETURNED}
    return (item for item in items if item.site != LOGITS or item.probe not in returned)


def returns_what_is_hooked(sides: Iterable[TensorSource], probe: str) -> bool:
    """Whether the returned value equals the hooked logits bit by bit on each side, so that one comparison covers both."""
    return all(_same(side, probe) for side in sides)


def _same(side: TensorSource, probe: str) -> bool:
    if not side.sites(probe).issuperset(OUTPUTS):
        return False
    hooked, returned = (side.digest(probe, site) for site in OUTPUTS)
    return hooked == returned != ""
