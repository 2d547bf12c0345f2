"""The interface that comparisons need of a capture: probes, sites, shapes, and rows of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from parity_audit.core.types import Probe


class TensorSource(Protocol):
    """A capture as tensors by probe name and site; `capture.store.Capture` implements this on disk."""

    @property
    def probes(self) -> Sequence[Probe]:
        """The probes that were run."""

    def sites(self, probe: str) -> set[str]:
        """The sites captured for one probe; empty if it was not run."""

    def shape(self, probe: str, site: str) -> tuple[int, ...]:
        """The shape of one tensor, without reading it."""

    def digest(self, probe: str, site: str) -> str:
        """A digest of the tensor's bytes: equal digests mean equal tensors. Empty if it is not known."""

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """The tensor's `[start, stop)` on axis 1, every other axis whole."""

    def assumes(self, probe: str, site: str) -> str:
        """The assumption about the program's code under which the tensor is this site; "" if a module of the program
        shows the site."""

    def raised(self, probe: str) -> str:
        """The step in which the program failed on this probe, and its error; "" if it ran or if there is no such
        record."""


@dataclass(frozen=True)
class View:
    """A capture, unchanged. Subclasses show a part of it, or show it in other coordinates."""

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
        """A digest of the tensor's bytes."""
        return self.source.digest(probe, site)

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """The tensor's `[start, stop)` on axis 1, every other axis whole."""
        return self.source.rows(probe, site, start, stop)

    def assumes(self, probe: str, site: str) -> str:
        """The assumption about the program's code under which the tensor is this site."""
        return self.source.assumes(probe, site)

    def raised(self, probe: str) -> str:
        """The step in which the program failed, and its error."""
        return self.source.raised(probe)


@dataclass(frozen=True)
class Without(View):
    """A capture without some sites of each probe."""

    hidden: Mapping[str, AbstractSet[str]]

    def sites(self, probe: str) -> set[str]:
        """The sites of the capture without the hidden ones."""
        return self.source.sites(probe) - self.hidden.get(probe, set())
