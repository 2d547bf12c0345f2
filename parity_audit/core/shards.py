"""The contents of the ranks of a sharded engine: how a whole tensor was put together, and where copies of it differ."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

WHOLE, SPLIT, SUM = "whole", "split", "sum"
OWN, PART_OF_RANK, OTHER_PLACES, OTHER_VALUES = "own", "part of rank {}", "rows of other places", "other values"
"""What a rank holds in place of its part of a tensor: that part, another rank's part, rows from another place of the
fused tensor, or numbers that the checkpoint does not have there."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What each rank in `ranks` held of one site in one probe.

    `how` is `whole` (each rank has all of it), `split` (the third axis is cut: `spans` are `(rank, start, stop)`) or
    `sum` (each rank has a summand). For the embedding and the logits, `spans` say which ids each rank has. `apart` has,
    for each rank, the RMS of its difference from the first rank that should hold the same. `files` are each rank's own
    values of a tensor that all should hold, relative to the manifest; they are kept if they differ.
    """

    probe: str
    site: str
    how: str
    ranks: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...] = ()
    apart: tuple[float, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether ranks that should hold the same hold different numbers."""
        return any(value != 0 for value in self.apart)


@dataclass(frozen=True, kw_only=True)
class RankTensor:
    """One checkpoint tensor of which some rank does not hold its own part.

    `holds` says for each rank in `ranks` what it has in place of its part.
    """

    name: str
    ranks: tuple[int, ...]
    holds: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankValue:
    """A live value of a knob that all ranks should share, with the value of each rank in `ranks`."""

    knob: str
    ranks: tuple[int, ...]
    values: tuple[Any, ...]


_OF_RANK = re.compile(r"rank (\d+): (.*)")


def of_rank(path: str) -> tuple[int | None, str]:
    """Return the rank of a path such as `rank 1: model.norm.weight` (None for every rank), and the path within that
    rank."""
    found = _OF_RANK.fullmatch(path)
    return (int(found[1]), found[2]) if found else (None, path)
