"""Faults behind one that no setting repairs: what only length shows, and what only decoded tokens show."""

import pytest

from parity_audit.selftest.corpus import load_corpus
from parity_audit.selftest.run import run_corpus

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
FAULTS = ("stack-neo-window-bf16-head", "stack-bloom-alibi-rolled-and-lost-in-decode")


def test_a_fault_without_a_patch_hides_none_behind_it(cache):
    scores = run_corpus(load_corpus().only(FAULTS)).scores

    stacked = {score.id: score for score in scores if score.parts}
    assert {name: score.parts for name, score in stacked.items()} == dict.fromkeys(FAULTS, ("named", "named"))
    assert [(score.false_alarms, score.proved) for score in stacked.values()] == [((), True)] * 2
    assert [score.found for score in scores if not score.parts] == [(), ()]  # the clean ports beside them
