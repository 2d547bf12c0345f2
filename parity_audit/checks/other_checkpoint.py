"""Report a port that was loaded from another checkpoint as one finding, not as one wrong tensor per name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parity_audit.checks.preflight import KNOB
from parity_audit.checks.weights import PER_CHANNEL, only_differs, tensors_of
from parity_audit.core.report import Finding
from parity_audit.core.types import WeightPrint
from parity_audit.diagnose.structure.sample import NOT_STORED
from parity_audit.diagnose.thresholds import LEFT_OUT

ANOTHER = "another checkpoint's"


def other_checkpoint_as_one(findings: Sequence[Finding], compared: Sequence[WeightPrint]) -> list[Finding]:
    """Return one candidate's findings, with all wrong tensors joined into one finding if nearly all compared tensors are wrong.

    Args:
        findings: findings in which each tensor is reported once (see `weights.told_once`).
        compared: the candidate's tensors that were compared with the reference's.
    """
    other = [finding for finding in findings if _holds_others(finding)]
    names = sorted({name for finding in other for name in tensors_of(finding)})
    if len(other) < 2 or len(names) < (1.0 - LEFT_OUT) * len(compared):
        return list(findings)
    first = next((finding for finding in other if finding.knob == KNOB), other[0])
    gone = {id(finding) for finding in other}
    one = dataclasses.replace(
        first, knob=KNOB, kind=KNOB, layers=None, reference_value="the checkpoint's", candidate_value=ANOTHER,
        evidence={"tensors": names, "compared": len(compared)},
        message=f"{len(names)} of {len(compared)} tensors of the candidate hold other values than the reference's: it "
        "was loaded from another checkpoint, such as a fine-tuned one, a merged one or another revision",
    )  # fmt: skip
    return [one, *(finding for finding in findings if id(finding) not in gone)]


def _holds_others(finding: Finding) -> bool:
    """Whether a finding says that tensors differ but gives no rule that turns one into the other."""
    if only_differs(finding):
        return True
    without_law = finding.candidate_value == NOT_STORED or finding.knob.endswith(PER_CHANNEL)
    return without_law and "tensors" in finding.evidence
