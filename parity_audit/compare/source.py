"""What the maths needs of a capture: probes, sites, shapes, and rows of a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from parity_audit.core.types import Probe


class TensorSource(Protocol):
    """A capture, seen as tensors by probe name and site. `capture.store.Capture` is the one on disk."""

    @property
    def probes(self) -> Sequence[Probe]:
        """The probes that were run."""

    def sites(self, probe: str) -> set[str]:
        """The sites held for one probe; empty when it was not run."""

    def shape(self, probe: str, site: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def digest(self, probe: str, site: str) -> str:
        """A name for the tensor's bytes: equal names, equal tensors. Empty where it is not known."""

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """The tensor's `[start, stop)` on axis 1, every other axis whole."""

    def assumes(self, probe: str, site: str) -> str:
        """What has to hold of the program's code for the tensor to be this site; empty where a module of it shows the site."""

    def raised(self, probe: str) -> str:
        """What of a probe the program broke off in, and its error; empty where it ran it or has no such thing."""


@dataclass(frozen=True)
class View:
    """A capture as it is; those below show it in part or in other coordinates."""

    source: TensorSource

    @property
    def probes(self) -> Sequence[Probe]:
        """The probes that were run."""
        return self.source.probes

    def sites(self, probe: str) -> set[str]:
        """The sites that can be compared."""
        return self.source.sites(probe)

    def shape(self, probe: str, site: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""
        return self.source.shape(probe, site)

    def digest(self, probe: str, site: str) -> str:
        """A name for the tensor's bytes."""
        return self.source.digest(probe, site)

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """The tensor's `[start, stop)` on axis 1, every other axis whole."""
        return self.source.rows(probe, site, start, stop)

    def assumes(self, probe: str, site: str) -> str:
        """What has to hold of the program's code for the tensor to be this site."""
        return self.source.assumes(probe, site)

    def raised(self, probe: str) -> str:
        """What the program broke off in, and its error."""
        return self.source.raised(probe)


@dataclass(frozen=True)
class Without(View):
    """A capture without some sites of each probe."""

    hidden: Mapping[str, AbstractSet[str]]

    def sites(self, probe: str) -> set[str]:
        """The sites that are left."""
        return self.source.sites(probe) - self.hidden.get(probe, set())
