"""Confidence is the share of right findings among those of the corpus that had the same marks."""

from __future__ import annotations

import dataclasses

import pytest
from test_findings import SPEC, fit

from parity_audit.diagnose.confidence import (
    BY_COMPARISON,
    DESCRIBED,
    FEW_SIGMAS,
    REMAINDER,
    SEEN,
    TIED,
    UNMARKED,
    confidence,
)
from parity_audit.diagnose.findings import merge


def laplace(mark: str) -> float:
    right, found = SEEN[mark]
    return pytest.approx((right + 1) / (found + 2), abs=1e-3)


@pytest.mark.parametrize("mark", SEEN)
def test_a_mark_is_as_sure_as_it_was_right_and_never_surer_than_a_clear_value(mark):
    assert confidence([mark]) == laplace(mark)
    assert confidence([mark]) <= confidence([])
    assert 0 < confidence([mark]) < 1


def test_what_is_compared_and_not_fitted_is_surer_than_a_relation_and_no_surer_than_a_clear_value():
    assert confidence([DESCRIBED]) < BY_COMPARISON <= confidence([])


def test_of_several_marks_the_one_that_was_right_least_often_counts():
    assert confidence([DESCRIBED, TIED, REMAINDER]) == min(map(confidence, ([DESCRIBED], [TIED], [REMAINDER])))


@pytest.mark.parametrize(
    ("mine", "theirs", "stderr", "mark"),
    [
        (1e-7, 1e-7, 1e-6, UNMARKED),
        (4e-3, 1e-7, 1e-6, REMAINDER),
        (1e-5, 1e-7, 1e-6, UNMARKED),  # of its own, too little to be another fault
        (3e-5, 1e-7, 1e-6, REMAINDER),
        (4e-3, 2e-3, 1e-6, UNMARKED),  # both sides leave it
        (4e-3, 5e-4, 1e-6, REMAINDER),
        (1e-7, 1e-7, 0.1, FEW_SIGMAS),
    ],
)
def test_what_makes_a_finding_less_sure(mine, theirs, stderr, mark):
    candidate = dataclasses.replace(fit(15.0, stderr=stderr), residual=mine)
    (finding,) = merge([candidate], [dataclasses.replace(fit(16.0, stderr=stderr), residual=theirs)], SPEC)

    assert finding.confidence == laplace(mark)
