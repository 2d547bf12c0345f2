"""What to write where the right value repaired nothing."""

import pytest

from parity_audit.core.report import Finding, Patch
from parity_audit.repair.rewrite import next_value


def patch(value):
    return Patch(knob="attention.scale", backend="python", value=value, edits=(), code="", fixes=("attention.scale",))


def finding(fitted, spec=16.0):
    return Finding(
        knob="attention.scale", kind="constant", layers=None, site="blocks.0.attn_scores", reference_value=spec,
        candidate_value=fitted, spec_value=spec, departs_from_spec="candidate",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "fitted", "wanted"),
    [
        (16.0, 256.0001, 1.0),  # folded twice: it divides by 16 of its own accord and is to be told to divide by 1
        (16.0, 32.0, 8.0),
        (16.0, 4.0, 64.0),
        (16.0, 20.4, 16.0 * 16.0 / 20.4),
        (16.0, 16.0001, None),  # right already: what is left is another fault
        (16.0, None, None),
        (None, 30.0, None),
        (0.0, 1.0, None),
    ],
)
def test_what_is_written_makes_up_for_what_the_port_adds(told, fitted, wanted):
    found = next_value(patch(told), finding(fitted))

    assert found == (wanted if wanted is None else pytest.approx(wanted, rel=1e-12))
