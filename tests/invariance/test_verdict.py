"""What bits and distances are called, from values with a known answer."""

from __future__ import annotations

import pytest
import torch

from parity_audit.core.invariance_report import CandidateInvariance, Invariance
from parity_audit.invariance import conditions
from parity_audit.invariance.conditions import ALONE, Condition
from parity_audit.invariance.distances import Floor
from parity_audit.invariance.observe import Seen
from parity_audit.invariance.runs import as_asked
from parity_audit.invariance.verdict import axis, exit_code, judged

POSITIONS, WIDTH, ROUNDING = 4, 64, 1e-6
SITES = ("blocks.0.q", "blocks.0.resid_post", "logits")
FLOOR = {site: Floor(rmse=(ROUNDING,) * POSITIONS, judge_rms=(1.0,) * POSITIONS) for site in SITES}


def seen(*, add: float = 0.0, sites=SITES, position: int | None = None, **more) -> Seen:
    values = {site: torch.ones(POSITIONS, WIDTH, dtype=torch.float64) for site in SITES}
    for site in sites:
        values[site][slice(None) if position is None else position] += add
    return Seen(values=values, **more)


def condition(name="2", axis_name=conditions.PREFILL, **more) -> Condition:
    return Condition(axis=axis_name, name=name, probe=conditions.probe("x", [(1, 2, 3, 4)]), size=2, **more)


def verdict(own: Seen, again: Seen | None = None, **more):
    return judged(condition(**more), own, seen(), again=again, floor=FLOOR, dtype="float32")


@pytest.mark.parametrize(
    ("own", "again", "expected"),
    [
        (seen(), None, Invariance.BITWISE),
        (seen(add=ROUNDING), seen(add=ROUNDING), Invariance.CLASS_ONLY),
        (seen(add=ROUNDING), seen(add=2 * ROUNDING), Invariance.NUMERIC),
        (seen(add=3.9 * ROUNDING), seen(add=3.9 * ROUNDING), Invariance.CLASS_ONLY),
        (seen(add=4.1 * ROUNDING), seen(add=4.1 * ROUNDING), Invariance.BROKEN),
        (seen(add=4.1 * ROUNDING, position=2), None, Invariance.BROKEN),
        (seen(add=1e-3, sites=("blocks.0.q",)), seen(add=1e-3, sites=("blocks.0.q",)), Invariance.CLASS_ONLY),
        (seen(non_finite=("logits",)), None, Invariance.BROKEN),
    ],
)
def test_verdicts(own, again, expected):
    assert verdict(own, again).verdict is expected


def test_what_is_before_the_compared_positions_does_not_count():
    assert verdict(seen(add=1.0, position=0), start=1).verdict is Invariance.BITWISE
    assert verdict(seen(add=1.0, position=1), start=1).verdict is Invariance.BROKEN


def test_a_run_that_does_not_repeat_is_never_class_only():
    own = seen(add=ROUNDING)

    assert verdict(own, own, axis_name=conditions.REPEAT).verdict is Invariance.NUMERIC
    assert verdict(own, own, axis_name=conditions.THREADS).verdict is Invariance.CLASS_ONLY


def test_a_condition_that_was_not_run_has_no_verdict():
    result = verdict(Seen(gap="it refused"))

    assert (result.verdict, result.gap) == (None, "it refused")
    assert verdict(seen(start=POSITIONS)).verdict is None


def test_the_change_is_named_with_its_site_and_its_size():
    result = verdict(seen(add=0.5, sites=("blocks.0.resid_post", "logits"), position=3))

    assert result.first_site == "blocks.0.resid_post"
    assert result.logits_max_abs == 0.5
    assert {one.site: one.position for one in result.changed} == {"blocks.0.resid_post": 3, "logits": 3}
    assert result.changed[0].ulp == pytest.approx(0.5 / 2**-23)


def test_an_axis_groups_equal_bits_and_has_the_worst_verdict():
    bases = {ALONE: seen()}
    ran = [("2", seen(add=ROUNDING)), ("3", seen(add=ROUNDING)), ("4", seen()), ("5", seen())]
    done = [
        (condition(name), own, judged(condition(name), own, bases[ALONE], again=own, floor=FLOOR, dtype="float32"))
        for name, own in ran
    ]

    found = axis(conditions.PREFILL, done, bases)

    assert found.words == "{1,>=4} {2,3}"
    assert found.verdict is Invariance.CLASS_ONLY


@pytest.mark.parametrize(
    ("facts", "more", "gap"),
    [
        ({"threads": 1}, {"threads": 2}, "threads in force: 1, not 2"),
        ({"requests_per_step": 1}, {}, "most requests in a step of the engine: 1, not 2"),
        ({"tokens_per_step": 29}, {"chunk": 8}, "most tokens in a step of the engine: 29, not 8"),
        ({"threads": 2, "requests_per_step": 2, "tokens_per_step": 8}, {"threads": 2, "chunk": 8}, ""),
    ],
)
def test_a_run_that_was_another_one_by_the_engines_own_counters_is_a_gap(facts, more, gap):
    assert as_asked(condition(**more), seen(facts=facts)).gap == gap


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ((), 3), ((Invariance.BITWISE, Invariance.NUMERIC), 0), ((Invariance.CLASS_ONLY,), 0),
        ((Invariance.BITWISE, Invariance.ERROR), 3), ((Invariance.ERROR, Invariance.BROKEN), 1),
    ],
)  # fmt: skip
def test_exit_codes(verdicts, code):
    found = [
        CandidateInvariance(backend="x", package="", version="", settings={}, verdict=one, why="") for one in verdicts
    ]

    assert exit_code(found) == code
