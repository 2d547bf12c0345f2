"""Which patches of a candidate under repair count."""

import pytest

from parity_audit.audit.rounds import IDLE, STUCK, State
from parity_audit.core.report import Patch, Patched, Verdict
from parity_audit.core.types import ReadBack
from parity_audit.repair.verify import Verified


def patch(knob, *, changed):
    read_back = (ReadBack(path="m", before=1, after=1, changed=changed),)
    return Patch(knob=knob, backend="hf", value=1, edits=(), code="", fixes=(knob,), read_back=read_back)


@pytest.fixture
def state():
    patched = Patched(verdict=Verdict.MISMATCH, logits=None, sites=(), target=1e-5, target_reached=False)
    patches = (
        patch("norm.eps", changed=True),
        patch("attention.alibi", changed=False),
        patch("rope.theta", changed=True),
    )
    verified = Verified(capture=None, comparison=None, patched=patched, patches=patches)
    return State(verified=verified, stuck={"rope.theta": STUCK, "logits.scale": STUCK})


def test_a_patch_that_changed_nothing_or_is_stuck_took_no_hold(state):
    assert state.took == {"norm.eps"}
    assert state.useless == {"attention.alibi": IDLE, "rope.theta": STUCK}


def test_nothing_took_hold_where_nothing_was_patched():
    assert State(stuck={"rope.theta": STUCK}).took == frozenset()
    assert State().useless == {}
