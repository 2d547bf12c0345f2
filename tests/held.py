"""A capture in memory: `compare.source.TensorSource` over a dictionary."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from parity_audit.core.types import Probe


def probe(name: str = "short", *, batch: int = 1, length: int = 4) -> Probe:
    """A probe without padding."""
    ids = tuple(tuple(range(8, 8 + length)) for _ in range(batch))
    return Probe(name=name, purpose="", token_ids=ids, mask=tuple((1,) * length for _ in range(batch)))


class Held:
    """Tensors by site, the same for its one probe."""

    def __init__(self, own: Probe, tensors: Mapping[str, Tensor], assumed: Collection[str] = ()) -> None:
        self.probes: Sequence[Probe] = (own,)
        self.tensors = tensors
        self.assumed = assumed

    def sites(self, probe: str) -> set[str]:
        return set(self.tensors)

    def shape(self, probe: str, site: str) -> tuple[int, ...]:
        return tuple(self.tensors[site].shape)

    def assumes(self, probe: str, site: str) -> str:
        return "a local of its code" if site in self.assumed else ""

    def raised(self, probe: str) -> str:
        return ""

    def digest(self, probe: str, site: str) -> str:
        return f"{self.shape(probe, site)} {hashlib.sha256(self.tensors[site].double().numpy().tobytes()).hexdigest()}"

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        return self.tensors[site][:, start:stop]
