"""Check whether the reference's logits can distinguish a right program from one that computes nothing.

Agreement means something only if the reference's logits do. Three programs that compute nothing are compared with the
reference by the verdict's own rule. If one of them would pass, no candidate's pass means anything:

- one that ignores its input (at every position it returns the mean over all positions),
- one that gives every token of the vocabulary the same logit,
- one that ignores earlier tokens (equal tokens get equal logits).

The same holds if most logits are exactly the largest or smallest value of their position: what was computed before a
cap or an overflow then does not show in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parity_audit.compare.floor import guard
from parity_audit.compare.source import TensorSource
from parity_audit.core.limits import limit_of
from parity_audit.core.sites import LOGITS
from parity_audit.core.types import Probe

SATURATED_SHARE = 0.5
"""Share of the logits that equal the largest or smallest of their position above which the reference is saturated.
Logits that are not saturated never reach it."""
PAIRS = 16
"""Number of pairs of positions with the same token after different earlier ones: one pair would do, several rule out
chance."""
ROWS = 64
"""Number of positions in memory at a time."""

IGNORES_INPUT = "the reference's logits do not depend on its input: a program that ignores the tokens would pass"
FLAT = "the reference gives every token of the vocabulary the same logit: a program that computes nothing would pass"
IGNORES_CONTEXT = "the reference's logits do not depend on earlier tokens: a program without attention would pass"
SATURATED = "{share:.0%} of the reference's logits are saturated: what is computed before that does not show in them"

Place = tuple[Probe, int, int]
"""A probe, a row of its batch, and a position."""


def no_signal(reference: TensorSource, judge: TensorSource | None, *, dtype: str) -> str:
    """The reason why agreement with this reference means nothing; "" if it means something, or if no logits are shown.

    Args:
        reference: the run whose distance to `judge` is rounding.
        judge: the reference in float64; without one, the rounding of storing a value is all that is known.
        dtype: the dtype of the run.
    """
    shown = [probe for probe in reference.probes if LOGITS in reference.sites(probe.name)]
    probes = [probe for probe in shown if probe.sites == "all"] or shown
    if judge is not None:
        probes = [probe for probe in probes if LOGITS in judge.sites(probe.name)]
    sums = _Sums()
    for probe in probes:
        for own, true in _rows(reference, judge, probe):
            sums.add(own, true)
    if not sums.rows:
        return ""
    smallest = limit_of(LOGITS) * max(sums.floor, guard(sums.size, dtype))
    truth = judge or reference
    pairs = same_token_pairs(probes)
    reasons = {
        FLAT: sums.over_vocabulary <= smallest,
        IGNORES_INPUT: sums.over_positions <= smallest,
        SATURATED.format(share=sums.at_extremes): sums.at_extremes > SATURATED_SHARE,
        IGNORES_CONTEXT: bool(pairs) and _apart(truth, pairs) <= smallest,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass
class _Sums:
    """Sums over positions: of the judge's logits, of the reference's error, and of the reference's logits at their
    extremes."""

    rows: int = 0
    entries: int = 0
    squares: float = 0.0
    errors: float = 0.0
    extremes: int = 0
    within_rows: float = 0.0
    from_first: Tensor = field(default_factory=lambda: torch.zeros(0))
    squares_from_first: float = 0.0
    first: Tensor | None = None

    def add(self, own: Tensor, true: Tensor) -> None:
        """Add logits `[row d_vocab]` of the reference and of its judge."""
        extremes = (own == own.amax(-1, keepdim=True)) | (own == own.amin(-1, keepdim=True))
        own, true = own.double(), true.double()
        if self.first is None:
            self.first, self.from_first = true[0], torch.zeros_like(true[0])
        away = true - self.first
        self.rows += len(true)
        self.entries += true.numel()
        self.squares += float(true.square().sum())
        self.errors += float((own - true).square().sum())
        self.extremes += int(extremes.sum())
        self.within_rows += float((true - true.mean(-1, keepdim=True)).square().sum())
        self.from_first += away.sum(0)
        self.squares_from_first += float(away.square().sum())

    @property
    def size(self) -> float:
        """RMS of the logits."""
        return math.sqrt(self.squares / self.entries)

    @property
    def floor(self) -> float:
        """RMSE(reference, judge)."""
        return math.sqrt(self.errors / self.entries)

    @property
    def at_extremes(self) -> float:
        """Share of the reference's logits that equal the largest or smallest of their position, not counting one of
        each."""
        always = 2 * self.rows
        return (self.extremes - always) / max(self.entries - always, 1)

    @property
    def over_vocabulary(self) -> float:
        """RMS of the logits around the mean over the vocabulary at their position."""
        return math.sqrt(self.within_rows / self.entries)

    @property
    def over_positions(self) -> float:
        """RMS of the logits around the mean of the same vocabulary entry over all positions."""
        mean = float((self.from_first / self.rows).square().sum()) * self.rows
        return math.sqrt(max(self.squares_from_first - mean, 0.0) / self.entries)


def _rows(reference: TensorSource, judge: TensorSource | None, probe: Probe) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits `[row d_vocab]` at real positions, of the reference and of the judge (of the reference twice if
    there is none)."""
    mask = torch.tensor(probe.mask, dtype=torch.bool)
    length = reference.shape(probe.name, LOGITS)[1]
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        keep = mask[:, start:stop]
        own = reference.rows(probe.name, LOGITS, start, stop)[keep]
        if len(own):
            yield own, own if judge is None else judge.rows(probe.name, LOGITS, start, stop)[keep]


def same_token_pairs(probes: Sequence[Probe]) -> list[tuple[Place, Place]]:
    """Pairs of places that have the same token after different earlier tokens, at most `PAIRS`."""
    seen: dict[int, tuple[tuple[int, ...], Place]] = {}
    pairs: list[tuple[Place, Place]] = []
    for probe in probes:
        for row, (ids, mask) in enumerate(zip(probe.token_ids, probe.mask, strict=True)):
            real = [position for position, kept in enumerate(mask) if kept]
            for number, position in enumerate(real):
                before = tuple(ids[earlier] for earlier in real[:number])
                known = seen.setdefault(ids[position], (before, (probe, row, position)))
                if known[0] != before:
                    pairs.append((known[1], (probe, row, position)))
    return pairs[:PAIRS]


def _apart(truth: TensorSource, pairs: Sequence[tuple[Place, Place]]) -> float:
    """RMS distance of the logits between the two places of each pair."""

    def at(place: Place) -> Tensor:
        probe, row, position = place
        return truth.rows(probe.name, LOGITS, position, position + 1)[row, 0].double()

    squares = [float((at(one) - at(other)).square().mean()) for one, other in pairs]
    return math.sqrt(sum(squares) / len(squares))
