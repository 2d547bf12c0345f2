"""The frequency at which each pair of components turns, read off rotated queries or keys, and the laws behind such a table.

No pair's rotation depends on another's, so every frequency is searched at once: on a grid whose neighbours are half a radian apart
at the last position, then by ever smaller steps. A law is a base and a scaling: its numbers are fitted to the table by
Gauss-Newton, where nothing wraps round as angles do. The formula of the rotation then says which law holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.fit.residuals import IMPOSSIBLE
from parity_audit.diagnose.fit.search import Difference, Path, free_paths, number_at, together, variants
from parity_audit.diagnose.fit.settings import with_numbers
from parity_audit.diagnose.thresholds import SAME_VALUE
from parity_audit.formulas.choices import SCALINGS
from parity_audit.formulas.frequencies import attention_factor, inverse_frequencies
from parity_audit.formulas.rotary import READ_WRITTEN, parts_of_pairs

THETA, SCALING = "rope.theta", "rope.scaling"
FACTOR = "attention_factor"
Table = dict[str, Any]
"""A scaling that says every frequency, `inv_freq` in radians per position, and the factor on cosines and sines."""
PER_TURN = 2
"""Points of the grid for each radian at the last position."""
MOST_POINTS = 4096
"""Of the grid in a long text, whose tokens stand ever further apart: most of them are near enough to its start for a coarser one."""
LEAST_ANGLE = 1e-12
"""Radians per position below which a pair does not turn: frequencies are neither searched nor compared more closely."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which components of a head turn, `pairs` of them from `first` on, and how they are joined."""

    d_head: int
    first: int
    pairs: int
    pairing: str

    def by_pair(self, off: Tensor) -> Tensor:
        """The squares of a flat difference `[token head d_head]`, summed for each pair."""
        turned = off.reshape(-1, self.d_head)[:, self.first : self.first + 2 * self.pairs]
        first, second = parts_of_pairs(turned, READ_WRITTEN[self.pairing][0])
        return (first.square() + second.square()).sum(0)


def read_off(layout: Layout, difference: Difference, longest: int, factor: float) -> Table | None:
    """The table of a rotation; None where nothing can be compared.

    Args:
        layout: what turns.
        difference: formula minus capture for a scaling, in one text.
        longest: the last position of the text.
        factor: what cosines and sines are multiplied by, to begin with.
    """
    points = min(math.ceil(math.pi * PER_TURN * longest), MOST_POINTS)
    grid = torch.linspace(0, math.pi, points, dtype=torch.float64)
    tried = torch.stack([_left(layout, difference, _table(at.expand(layout.pairs), factor)) for at in grid])
    if not bool(tried.isfinite().all()):
        return None
    found = _halved(layout, difference, _table(grid[tried.argmin(0)], factor), float(grid[1]))
    # Beside a wrong factor what is left hardly depends on the frequencies near the right ones.
    (factor,), _ = together(lambda numbers: difference({**found, FACTOR: numbers[0]}), (factor,), (True,))
    return sharpened(layout, difference, {**found, FACTOR: factor}, longest)


def sharpened(layout: Layout, difference: Difference, found: Table, longest: int) -> Table:
    """A table that was read off one text, as all texts have it, whose longest has its last position at `longest`."""
    return _halved(layout, difference, found, 1.0 / longest**2)


def _table(frequencies: Tensor, factor: float) -> Table:
    return {"rope_type": "table", "inv_freq": frequencies.tolist(), FACTOR: factor}


def _halved(layout: Layout, difference: Difference, found: Table, width: float) -> Table:
    """The table with each frequency moved by ever smaller steps, the first of which is `width`, wherever less is left."""
    at, least = torch.tensor(found["inv_freq"], dtype=torch.float64), _left(layout, difference, found)
    while width > LEAST_ANGLE:
        for step in (width, -width):
            trial = _left(layout, difference, _table(at + step, found[FACTOR]))
            at, least = torch.where(trial < least, at + step, at), torch.minimum(trial, least)
        width /= 2
    return _table(at, found[FACTOR])


def _left(layout: Layout, difference: Difference, tried: Table) -> Tensor:
    """What is left of each pair, `[pair]`."""
    off = difference(tried)
    return torch.full((layout.pairs,), math.inf, dtype=torch.float64) if off is None else layout.by_pair(off)


def laws(table: Table, said: Mapping[str, Any], length: int) -> Iterator[dict[str, Any]]:
    """Settings of base and scaling whose tables are as near to this one as their numbers can bring them.

    Args:
        table: what was read off.
        said: the spec's base and scaling; the base is kept where it can be.
        length: tokens of the text that it was read off.
    """
    frequencies = torch.tensor(table["inv_freq"], dtype=torch.float64)
    ratio = float(frequencies[0] / frequencies[1]) if len(frequencies) > 1 else 0.0
    bases = [said[THETA], *([ratio ** len(frequencies)] if ratio > 1.0 else [])]
    for scaling in (None, *variants(said[SCALING]), *SCALINGS):
        for base in bases:
            paths = [*([] if base == said[THETA] else [(THETA,)]), *((SCALING, *path) for path in free_paths(scaling))]
            law = _nearest({THETA: base, SCALING: scaling}, paths, frequencies, length)
            law[SCALING] = _with_factor(law[SCALING], table[FACTOR])
            yield {knob: value for knob, value in law.items() if value != said[knob]}


def _with_factor(scaling: dict[str, Any] | None, factor: float) -> dict[str, Any] | None:
    """A scaling, with a factor on cosines and sines where it is not the one that the scaling implies."""
    try:
        is_implied = math.isclose(attention_factor(scaling), factor, rel_tol=SAME_VALUE)
    except IMPOSSIBLE:
        is_implied = True
    return scaling if is_implied else {**(scaling or {}), FACTOR: factor}


def _nearest(start: dict[str, Any], paths: Sequence[Path], frequencies: Tensor, length: int) -> dict[str, Any]:
    """A law with the numbers at these places moved to where its table is nearest: in radians at the end of the text where these are
    less than one, as a share of the frequency where they are more."""
    weights = (frequencies * length).clamp_max(1.0)
    target = frequencies.clamp_min(LEAST_ANGLE).log()

    def off(numbers: Sequence[float]) -> Tensor | None:
        own = with_numbers(start, paths, numbers)
        try:
            made = inverse_frequencies(own[THETA], own[SCALING], 2 * len(target), length)
        except IMPOSSIBLE:
            return None
        return (made.clamp_min(LEAST_ANGLE).log() - target) * weights

    first = tuple(number_at(start, path) for path in paths)
    return with_numbers(start, paths, together(off, first, [True] * len(first))[0] if first else first)
