"""What a model returns behind its last hook, and in which words that is said."""

from __future__ import annotations

import pytest
import torch
from held import Held, probe

from parity_audit.compare.deltas import compare
from parity_audit.diagnose.returned import changed_by, returned_findings

PROBE = probe(length=12)
RIGHT = torch.randn(1, 12, 40, generator=torch.Generator().manual_seed(2))


def told(hooked, returned):
    """Findings and warnings of a port that shows `hooked` and returns `returned`."""
    truth = Held(PROBE, {"logits": RIGHT, "returned": RIGHT})
    judge = Held(PROBE, {"logits": RIGHT + 1e-7, "returned": RIGHT + 1e-7})
    own = Held(PROBE, {"logits": hooked, "returned": returned})
    return returned_findings(own, compare(own, truth, judge, dtype="float32"), "float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.clamp(-1.5, 1.5), "clipped to -1.5 ... 1.5"),
        (lambda x: 0.5 * x, "multiplied by 0.5"),
        (lambda x: x.to(torch.bfloat16).float(), "rounded to bfloat16"),
        (lambda x: x - x.mean(-1, keepdim=True), "shifted by a constant per token"),
        (lambda x: torch.cat([x[:, :3].flip(-1), x[:, 3:]], 1), "3 of 12 tokens differ"),
    ],
)
def test_what_is_done_behind_the_hook_is_said(change, said):
    findings, warnings = told(RIGHT, change(RIGHT))

    assert warnings == []
    assert [finding.knob for finding in findings] == ["logits.returned"]
    assert findings[0].message.startswith("the hook shows the reference's logits, the model returns others: ")
    assert said in findings[0].message


def test_a_hook_that_lies_is_a_warning_and_no_finding():
    findings, warnings = told(2 * RIGHT, RIGHT)

    assert findings == []
    assert len(warnings) == 1
    assert "what it returns agrees with the reference" in warnings[0]


def test_both_wrong_in_different_ways_is_told_as_that():
    findings, _ = told(2 * RIGHT, 3 * RIGHT)

    assert "other logits, which are not the reference's either" in findings[0].message
    assert "multiplied by 1.5" in findings[0].message


@pytest.mark.parametrize("error", [0.0, 1e-7])
def test_rounding_behind_the_hook_is_nothing(error):
    assert told(RIGHT, RIGHT * (1 + error)) == ([], [])


def test_a_shape_that_only_the_returned_value_has_is_named():
    findings, _ = told(RIGHT, RIGHT[:, :1])

    assert [(finding.knob, finding.candidate_value) for finding in findings] == [("logits.shape", [1, 1, 40])]


def test_a_clip_that_nothing_reaches_is_no_clip():
    assert changed_by([RIGHT[0].double()], [2 * RIGHT[0].double()], "float32") == "multiplied by 2"
