"""Bisection on known answers: every place of the change, every set of places that cannot be judged."""

from __future__ import annotations

from itertools import product

import pytest

from parity_audit.bisection.run import shows
from parity_audit.bisection.search import neighbours
from parity_audit.core.bisection import BisectReport, Change, Observation
from parity_audit.core.errors import UsageError
from parity_audit.envs.releases import Release, by_date
from parity_audit.report.bisect_content import headline


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_every_change_is_found_in_few_steps(count):
    for change in range(1, count):
        asked = []

        def state(place, change=change, asked=asked):
            asked.append(place)
            return place >= change

        assert neighbours(0, count - 1, state) == (change - 1, change)
        assert len(set(asked)) <= 2 + (count - 1).bit_length()


@pytest.mark.parametrize("dead", list(product([False, True], repeat=4)))
@pytest.mark.parametrize("change", range(1, 6))
def test_places_that_cannot_be_judged_are_left_between_the_nearest_that_can(dead, change):
    judged = [0, *(place for place in range(1, 5) if not dead[place - 1]), 5]
    low, high = neighbours(0, 5, lambda place: (place >= change) if place in judged else None)

    assert low == max(place for place in judged if place < change)
    assert high == min(place for place in judged if place >= change)


def test_releases_are_ordered_by_their_day_and_by_version_where_one_is_unknown():
    late_fix, newer = Release(version="2.9.1", date="2025-01-01"), Release(version="3.0.0", date="2024-12-01")

    assert by_date([late_fix, newer]) == ([newer, late_fix], True)
    assert by_date([newer, Release(version="2.10.0", date=""), late_fix]) == (
        [late_fix, Release(version="2.10.0", date=""), newer], False
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "other", "one"),
    [("14.9666", "14.9667", True), ("14.9666", "16", False), ("none", "none", True), ("none", '{"factor": 32}', False)],
)
def test_another_value_of_the_same_constant_is_another_fault(value, other, one):
    seen = Observation(version="1", date="", faults={"rope.scaling": other})

    assert shows(seen, "rope.scaling", value) is one
    assert shows(seen, "rope.theta", value) is False


def test_the_headline_names_release_day_fault_and_what_is_unknown():
    change = Change(
        fault="rope.scaling", kind="repaired", release="2.8.1", date="2024-10-26", before="2.8.0", value="none",
        unknown=("2.8.0.post1",), otherwise="{}",
    )  # fmt: skip
    report = BisectReport(
        model="m", backend="transformer_lens", reference="hf", good="2.10.0", bad="2.8.0", order="release date", probes=(),
        changes=(change,), observations=(), exit_code=0,
    )  # fmt: skip
    assert headline(report) == (
        "transformer_lens 2.8.1 of 2024-10-26 (or one of 2.8.0.post1, which could not be judged) repaired rope.scaling none "
        "(2.8.0 still has it; it shows {} instead, which departs too)"
    )


@pytest.mark.parametrize(
    ("backend", "good", "bad"), [("python:{file}:load", "1", "2"), ("hf==5.0.0", "1", "2"), ("hf", "1.0", "1")]
)
def test_questions_without_releases_are_refused(backend, good, bad):
    from parity_audit.bisection.run import run_bisection
    from parity_audit.core.backend_ref import parse_backend

    with pytest.raises(UsageError):
        run_bisection(
            "gpt2",
            parse_backend(backend.format(file=__file__)) if "python" not in backend else _port(),
            good=good,
            bad=bad,
        )


def _port():
    from parity_audit.core.types import BackendRef

    return BackendRef(name="python", target=f"{__file__}:load")
