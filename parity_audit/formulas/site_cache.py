"""A memory of computed sites, reused by runs with other knob values if nothing that the site depends on has changed.

A search tries thousands of values of a few knobs on the same inputs, and most of a block does not depend on these knobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from parity_audit.formulas.knobs import name_in_spec
from parity_audit.formulas.place import Dependencies, Values

BYTES_KEPT = 2**30
"""The limit on the bytes of all kept tensors. It is enough for the queries, keys and values of 8256 tokens in a model of 70 billion
weights, and small compared with such a model."""
Name = tuple[str, str]
"""The name of runs with the same batch, given tensors and checkpoint, and the name of a site."""
Said = tuple[str | None, Sequence[Any] | None]


@dataclass(frozen=True, kw_only=True)
class ComputedSite:
    """The tensor of a site, and the record of the knobs and sites that its formula asked for."""

    tensor: Tensor
    took: Dependencies


@dataclass(frozen=True, kw_only=True)
class _Entry:
    made: ComputedSite
    said: Mapping[str, Said]
    bytes: int


@dataclass(kw_only=True)
class SiteCache:
    """The last computed tensor of each site; the least recently used ones are dropped if all together exceed `BYTES_KEPT`."""

    entries: dict[Name, _Entry] = field(default_factory=dict)
    bytes: int = 0

    def found(self, name: Name, values: Values) -> ComputedSite | None:
        """Return the kept tensor of this name if every knob that it depends on has the same value in `values`, else None."""
        entry = self.entries.get(name)
        if entry is None or not all(_same(said, said_of(knob, values)) for knob, said in entry.said.items()):
            return None
        self.entries[name] = self.entries.pop(name)
        return entry.made

    def keep(self, name: Name, made: ComputedSite, values: Values) -> None:
        """Keep a site's tensor in place of the one that was kept before; a tensor larger than `BYTES_KEPT` is not kept."""
        size = made.tensor.numel() * made.tensor.element_size()
        self._drop(name)
        if size > BYTES_KEPT:
            return
        while self.bytes + size > BYTES_KEPT:
            self._drop(next(iter(self.entries)))
        said = {knob: said_of(knob, values) for knob in (*made.took.asked, *made.took.besides)}
        self.entries[name] = _Entry(made=made, said=said, bytes=size)
        self.bytes += size

    def _drop(self, name: Name) -> None:
        dropped = self.entries.pop(name, None)
        self.bytes -= 0 if dropped is None else dropped.bytes


def said_of(knob: str, values: Values) -> Said:
    """Return the name under which `values` gives a knob, and the knob's values in all layers; both None if it is not given."""
    name = name_in_spec(knob, values)
    return name, None if name is None else values[name]


def _same(one: Said, other: Said) -> bool:
    return one[0] == other[0] and (one[1] is other[1] or repr(one[1]) == repr(other[1]))
