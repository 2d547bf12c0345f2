"""A patch whose setting the live model lacks is said to have no place, and the others go on."""

from __future__ import annotations

import pytest

from parity_audit.core.errors import BackendFailed
from parity_audit.core.types import Edit
from parity_audit.repair.choose import Proposal
from parity_audit.repair.verify import with_live_setting


class Applies:
    """As much of a session as is asked for: it holds edits, or refuses them as a worker does."""

    def __init__(self, lacks: str, error: str = "NoSuchPath"):
        self.lacks, self.error, self.edits = lacks, error, ()

    def apply(self, edits):
        if any(edit.path == self.lacks for edit in edits):
            raise BackendFailed(f"python failed during `apply`: {self.error}: `{self.lacks}` is not in Model\nmore")
        self.edits = tuple(edits)
        return ()


def proposal(knob: str, path: str) -> Proposal:
    return Proposal(knob=knob, backend="hf", value=1.0, edits=(Edit(op="set", path=path, value=1.0),))


SCALE, THETA = proposal("attention.scale", "scaling"), proposal("rope.theta", "inv_freq")


def test_what_has_no_place_is_left_out_and_said():
    session = Applies("inv_freq")
    there, gaps = with_live_setting(session, [SCALE, THETA])

    assert there == [SCALE]
    assert session.edits == SCALE.edits
    assert [(gap.what, gap.why) for gap in gaps] == [
        ("a patch for rope.theta", "this model has no place for its setting: `inv_freq` is not in Model")
    ]


def test_what_has_a_place_is_in_force():
    session = Applies("elsewhere")

    assert with_live_setting(session, [SCALE, THETA]) == ([SCALE, THETA], [])
    assert session.edits == (*SCALE.edits, *THETA.edits)


def test_another_failure_is_not_taken_for_a_missing_place():
    with pytest.raises(BackendFailed):
        with_live_setting(Applies("inv_freq", error="RuntimeError"), [THETA])
