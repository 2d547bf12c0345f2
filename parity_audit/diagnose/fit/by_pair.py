"""Fit the rotary frequency of each pair of components to rotated queries or keys, and find the base and scaling behind
the frequencies.

The rotation of a pair depends on no other pair, so all frequencies are searched at once: first on a grid whose
neighbouring points are half a radian apart at the last position, then by ever smaller steps. A law is a base and a
scaling. Its numbers are fitted to the table of frequencies, not to the rotated tensors, by Gauss-Newton: frequencies do
not wrap round as angles do. The formula of the rotation then decides which law holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.fit.residuals import IMPOSSIBLE
from parity_audit.diagnose.fit.search import Difference, Path, free_paths, gauss_newton, number_at, variants
from parity_audit.diagnose.fit.settings import with_numbers
from parity_audit.diagnose.thresholds import SAME_VALUE
from parity_audit.formulas.choices import SCALINGS
from parity_audit.formulas.frequencies import attention_factor, inverse_frequencies
from parity_audit.formulas.rotary import READ_WRITTEN, parts_of_pairs

THETA, SCALING = "rope.theta", "rope.scaling"
FACTOR = "attention_factor"
Table = dict[str, Any]
"""A rotary scaling that lists every frequency in `inv_freq`, in radians per position, and the factor on cosines and
sines."""
PER_TURN = 2
"""Grid points per radian at the last position."""
MOST_POINTS = 4096
"""The largest number of grid points. In a long text the compared tokens stand ever further apart, and most are so
near its start that a coarser grid suffices for them."""
LEAST_ANGLE = 1e-12
"""Radians per position below which a pair counts as not rotated: frequencies are neither searched nor compared more
finely than this."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which components of a head are rotated (`pairs` pairs, from component `first` on), and how they are joined in
    pairs."""

    d_head: int
    first: int
    pairs: int
    pairing: str

    def by_pair(self, off: Tensor) -> Tensor:
        """Return the sum of squares of each pair, `[pair]`, of a flat difference `[token head d_head]`."""
        turned = off.reshape(-1, self.d_head)[:, self.first : self.first + 2 * self.pairs]
        first, second = parts_of_pairs(turned, READ_WRITTEN[self.pairing][0])
        return (first.square() + second.square()).sum(0)


def read_off(layout: Layout, difference: Difference, longest: int, factor: float) -> Table | None:
    """Return the table of frequencies that fits a rotation best; None if the rotation cannot be computed or compared at
    some grid point.

    Args:
        layout: which components are rotated, and in which pairs.
        difference: formula minus capture for a scaling, in one text.
        longest: the number of positions of the text.
        factor: the start value of the factor on cosines and sines.
    """
    points = min(math.ceil(math.pi * PER_TURN * longest), MOST_POINTS)
    grid = torch.linspace(0, math.pi, points, dtype=torch.float64)
    tried = torch.stack([_left(layout, difference, _table(at.expand(layout.pairs), factor)) for at in grid])
    if not bool(tried.isfinite().all()):
        return None
    found = _halved(layout, difference, _table(grid[tried.argmin(0)], factor), float(grid[1]))
    # With a wrong factor, the residual hardly depends on the frequencies near the right ones: fit the factor, then refine.
    (factor,), _ = gauss_newton(lambda numbers: difference({**found, FACTOR: numbers[0]}), (factor,), (True,))
    return sharpened(layout, difference, {**found, FACTOR: factor}, longest)


def sharpened(layout: Layout, difference: Difference, found: Table, longest: int) -> Table:
    """Refine a table that was fitted to one text on the difference over all texts; the longest of them has `longest`
    positions."""
    return _halved(layout, difference, found, 1.0 / longest**2)


def _table(frequencies: Tensor, factor: float) -> Table:
    return {"rope_type": "table", "inv_freq": frequencies.tolist(), FACTOR: factor}


def _halved(layout: Layout, difference: Difference, found: Table, width: float) -> Table:
    """Refine a table: move each frequency up or down wherever that lowers the residual of its pair, with steps that
    halve from `width` on."""
    at, least = torch.tensor(found["inv_freq"], dtype=torch.float64), _left(layout, difference, found)
    while width > LEAST_ANGLE:
        for step in (width, -width):
            trial = _left(layout, difference, _table(at + step, found[FACTOR]))
            at, least = torch.where(trial < least, at + step, at), torch.minimum(trial, least)
        width /= 2
    return _table(at, found[FACTOR])


def _left(layout: Layout, difference: Difference, tried: Table) -> Tensor:
    """Return the squared residual of each pair under a table, `[pair]`; infinite where the table is impossible."""
    off = difference(tried)
    return torch.full((layout.pairs,), math.inf, dtype=torch.float64) if off is None else layout.by_pair(off)


def laws(table: Table, said: Mapping[str, Any], length: int) -> Iterator[dict[str, Any]]:
    """Yield settings of base and scaling whose numbers are fitted to a table of frequencies; a setting names only knobs
    that differ from the spec.

    Args:
        table: the table that was fitted.
        said: the spec's base and scaling. The spec's base is tried first, then a base fitted to the table.
        length: the number of tokens of the text to which the table was fitted.
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
    """Return a scaling, with an explicit factor on cosines and sines if the table's factor is not the one that the
    scaling implies."""
    try:
        is_implied = math.isclose(attention_factor(scaling), factor, rel_tol=SAME_VALUE)
    except IMPOSSIBLE:
        is_implied = True
    return scaling if is_implied else {**(scaling or {}), FACTOR: factor}


def _nearest(start: dict[str, Any], paths: Sequence[Path], frequencies: Tensor, length: int) -> dict[str, Any]:
    """Return a law whose numbers at these places are fitted to a table of frequencies by least squares.

    The error of a frequency is measured in radians at the end of the text where its angle there is below one radian,
    and relative to the frequency elsewhere.
    """
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
    return with_numbers(start, paths, gauss_newton(off, first, [True] * len(first))[0] if first else first)
