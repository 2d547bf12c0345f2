"""How sure a finding is: how often findings with the same marks were right, among planted faults.

    confidence = (right + 1) / (found + 2)          (Laplace's rule of succession, for the mark that was right least often)

A mark that no finding of the corpus had gives one half: nothing is known of it. The corpus was written next to the auditor, so that
these are upper bounds for faults of other kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

UNMARKED = "the value leaves rounding, and no other does"
REMAINDER = "the value leaves more than the reference's does"
FEW_SIGMAS = "the values are few standard errors apart"
TIED = "another value explains as much"
DESCRIBED = "a relation to the reference's values, not a constant of the formulas"
SEEN: Mapping[str, tuple[int, int]] = {
    UNMARKED: (571, 571),
    REMAINDER: (47, 47),
    FEW_SIGMAS: (1, 1),
    TIED: (0, 0),
    DESCRIBED: (14, 14),
}
"""Of the findings with each mark: how many were right, and how many there were, in 641 planted faults of 24 November 2026, on random
weights and on trained and trained-like ones: `benchmarks/README.md` has both runs."""

BY_COMPARISON = 0.99
"""Of a finding that compares what is held, returned or repeated with what it should be: it follows from the comparison, and only
what is compared (the spec, the map of sites, the checkpoint) can be wrong."""


def confidence(marks: Iterable[str]) -> float:
    """The least share of right findings over the marks of a finding, `UNMARKED` where it has none; in (0, 1)."""
    return round(min(_share(*SEEN[mark]) for mark in (*marks, UNMARKED)), 3)


def _share(right: int, found: int) -> float:
    return (right + 1) / (found + 2)
