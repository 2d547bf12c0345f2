"""Compute the value that a setting needs if its right value did not repair the port.

A port that applies a constant twice has the right setting but computes with its square. The value that the patch set is
`told`, and the fitted value is what the port computes with, so the port multiplies the setting by `fitted / told`. It
computes with the right value `target` if the setting is `told * target / fitted`.
"""

from __future__ import annotations

from parity_audit.core.report import Finding, Patch
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.agreement import is_number, same
from parity_audit.repair.choose import target_value

ROUND = 1e-4
"""Relative. Fitted values carry rounding: a value this near to a whole number or to the inverse of one is replaced by it."""


def next_value(patch: Patch, finding: Finding, match_reference: bool = False) -> KnobValue:
    """Return the value to set instead; None if a value is not a positive number, or if the fitted one is right already."""
    told, fitted, target = patch.value, finding.candidate_value, target_value(finding, match_reference)
    if not all(is_number(value) and value > 0 for value in (told, fitted, target)):  # type: ignore[operator]
        return None
    if same(fitted, target, ROUND):
        return None
    return rounded(float(told) * float(target) / float(fitted))  # type: ignore[arg-type]


def rounded(value: float) -> float:
    """Return the whole number, or the inverse of one, that equals a value within `ROUND`; else the value itself."""
    for near in (float(round(value)), 1.0 / round(1.0 / value) if round(1.0 / value) else 0.0):
        if near and same(value, near, ROUND):
            return near
    return value
