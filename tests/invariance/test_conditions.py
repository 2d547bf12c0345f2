"""Every condition holds the subject, whole, at the row that it says, and its twin differs in the neighbours alone."""

from __future__ import annotations

import random

import pytest

from parity_audit.invariance import conditions
from parity_audit.invariance.conditions import Planner

SUBJECT = tuple(range(100, 129))


@pytest.fixture
def plan() -> Planner:
    return Planner(subject=SUBJECT, vocab=4096, bos=2, draw=random.Random(0))


@pytest.fixture
def every(plan):
    whole, decoded = conditions.alone(SUBJECT)
    return [
        whole, decoded, *conditions.again(whole, (1, 2)), *conditions.batches(plan, (1, 2, 5, 9)), *conditions.places(plan),
        *conditions.neighbours(plan), *conditions.paddings(plan), *conditions.steps(plan, 16),
    ]  # fmt: skip


def _real(condition, row):
    pairs = zip(condition.probe.token_ids[row], condition.probe.mask[row], strict=True)
    return tuple(token for token, real in pairs if real)


def test_the_subject_is_where_the_condition_says(every):
    assert len(every) > 30
    for condition in every:
        assert _real(condition, condition.row) == SUBJECT, condition.name
        assert len(condition.probe.token_ids) == condition.size, condition.name


def test_names_of_files_are_told_apart(every):
    names = [condition.probe.name for condition in every]

    assert len(set(names)) == len(names)
    assert all("/" not in name and " " not in name for name in names)


def test_a_twin_has_the_same_shape_and_other_neighbours(every, plan):
    for condition in every:
        other = conditions.twin(condition, plan)

        assert other.probe.mask == condition.probe.mask
        assert (other.row, other.start, other.chunk) == (condition.row, condition.start, condition.chunk)
        assert _real(other, condition.row) == SUBJECT
        for row in range(condition.size):
            assert (_real(other, row) == _real(condition, row)) == (row == condition.row), condition.name


def test_a_twin_of_a_padded_batch_keeps_the_padding(plan):
    left = next(one for one in conditions.paddings(plan) if one.name == "left by 16")

    assert left.probe.mask[0] == (0,) * 16 + (1,) * len(SUBJECT)
    assert conditions.twin(left, plan).probe.token_ids[0] == left.probe.token_ids[0]
