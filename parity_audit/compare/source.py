"""What the maths needs of a capture: probes, sites, shapes, and rows of a tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
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

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """The tensor's `[start, stop)` on axis 1, every other axis whole."""

    def assumes(self, probe: str, site: str) -> str:
        """What has to hold of the program's code for the tensor to be this site; empty where a module of it shows the site."""
