"""What formulas made under other knob values, kept for runs in which everything that it depends on is the same.

A search tries thousands of values of a few knobs on the same inputs; most of a block does not depend on those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from parity_audit.formulas.knobs import said_by
from parity_audit.formulas.place import Took, Values

BYTES_KEPT = 2**30
"""Bytes of all tensors that are kept: queries, keys and values of a text of 8256 tokens of a model of 70 billion weights, and little
beside such a model."""
Name = tuple[str, str]
"""Of runs that are alike, and of a site."""
Said = tuple[str | None, Sequence[Any] | None]


@dataclass(frozen=True, kw_only=True)
class Made:
    """The tensor of a site, and what its formula took."""

    tensor: Tensor
    took: Took


@dataclass(frozen=True, kw_only=True)
class _Entry:
    made: Made
    said: Mapping[str, Said]
    bytes: int


@dataclass(kw_only=True)
class Kept:
    """The last tensor of each site; those not taken for longest are dropped where all are too many."""

    entries: dict[Name, _Entry] = field(default_factory=dict)
    bytes: int = 0

    def found(self, name: Name, values: Values) -> Made | None:
        """What was made of a site by this name, where the same is said of every knob that it depends on."""
        entry = self.entries.get(name)
        if entry is None or not all(_same(said, said_of(knob, values)) for knob, said in entry.said.items()):
            return None
        self.entries[name] = self.entries.pop(name)
        return entry.made

    def keep(self, name: Name, made: Made, values: Values) -> None:
        """Keep a site's tensor in place of the one that was kept before."""
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
    """What is said of a knob in all layers, and under which name."""
    name = said_by(knob, values)
    return name, None if name is None else values[name]


def _same(one: Said, other: Said) -> bool:
    return one[0] == other[0] and (one[1] is other[1] or repr(one[1]) == repr(other[1]))
