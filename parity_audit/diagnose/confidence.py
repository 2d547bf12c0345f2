"""The confidence of a finding: how often findings with the same marks were right, measured on planted faults.

    confidence = (right + 1) / (found + 2)          (Laplace's rule of succession)

A mark is a property of a finding that may make it less certain. A finding with several marks gets the confidence of the
mark whose findings were right least often.

A mark that no finding of the corpus had gives one half, since nothing is known about it. The corpus was written
together with the auditor, so these are upper bounds for faults of other kinds.
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
"""For each mark, the number of findings with it that were right, and the number of findings with it.

Measured on 641 planted faults on 24 November 2026, in models with random weights and in trained and trained-like ones;
`benchmarks/README.md` describes both runs.
"""

BY_COMPARISON = 0.99
"""Confidence of a finding that compares a stored tensor, a returned value or a repeated run with what it should be.
Such a finding follows from the comparison itself, so only what it is compared with (the spec, the map of sites, the
checkpoint) can be wrong."""


def confidence(marks: Iterable[str]) -> float:
    """The lowest share of right findings over the marks of a finding and `UNMARKED`, in (0, 1)."""
    return round(min(_share(*SEEN[mark]) for mark in (*marks, UNMARKED)), 3)


def _share(right: int, found: int) -> float:
    return (right + 1) / (found + 2)
