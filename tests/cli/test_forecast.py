"""The time that runs will still take, against a clock that the test moves."""

from __future__ import annotations

import pytest

from parity_audit.cli.forecast import Forecast
from parity_audit.core.progress import CAPTURE, REUSE, RUNS

PROBES = (2.0, 10.0, 1.0)
"""Seconds of each probe in the first run."""


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(forecast, clock, pace=1.0, probes=PROBES):
    """What is said at the beginning of every probe of one run."""
    said = []
    for number, seconds in enumerate(probes):
        said.append(forecast.seconds_left(CAPTURE, number, len(probes)))
        clock.now += pace * seconds
    forecast.seconds_left("compare", None, None)
    return said


@pytest.fixture
def told():
    """A forecast of four runs that has seen the first, and its clock."""
    clock = Clock()
    forecast = Forecast(clock=clock)
    assert forecast.seconds_left(RUNS, None, 4) is None
    assert run(forecast, clock) == [None, None, None]
    return forecast, clock


def test_a_slower_run_is_followed_at_its_own_pace_and_the_rest_at_that_of_the_first(told):
    forecast, clock = told
    assert run(forecast, clock, pace=2.0) == [3 * 13.0, 2 * 11.0 + 2 * 13.0, 2 * 1.0 + 2 * 13.0]
    clock.now += 50.0  # comparisons are not counted
    assert run(forecast, clock) == [2 * 13.0, 11.0 + 13.0, 1.0 + 13.0]
    assert run(forecast, clock) == [13.0, 11.0, 1.0]


def test_runs_of_other_probes_say_nothing_and_do_not_count(told):
    forecast, clock = told
    assert run(forecast, clock, probes=(5.0, 5.0)) == [None, None]
    assert run(forecast, clock) == [3 * 13.0, 11.0 + 2 * 13.0, 1.0 + 2 * 13.0]


def test_a_run_that_is_reused_is_none_to_wait_for(told):
    forecast, clock = told
    forecast.seconds_left(REUSE, None, None)
    assert run(forecast, clock)[0] == 2 * 13.0


def test_a_run_that_broke_off_is_begun_anew(told):
    forecast, clock = told
    forecast.seconds_left(CAPTURE, 0, 3)
    clock.now += 2.0
    forecast.seconds_left(CAPTURE, 1, 3)
    assert run(forecast, clock)[0] == 3 * 13.0


def test_more_runs_than_were_announced_are_never_a_negative_time(told):
    forecast, clock = told
    for _ in range(4):
        run(forecast, clock)
    assert run(forecast, clock) == [13.0, 11.0, 1.0]
