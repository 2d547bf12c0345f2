"""Which value a setting wants whose right value did not repair it.

A port that folds a constant twice has the right setting and computes with its square. What it computes with is what
was fitted, what it was told is what was read back, so it makes `fitted / told` of what it is told. It is right when it
is told `told * reference / fitted`.
"""

from __future__ import annotations

from parity_audit.core.report import Finding, Patch
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.agreement import is_number, same
from parity_audit.repair.choose import target_value

ROUND = 1e-4
"""Fitted values carry rounding; a value that is this near to a whole number or to its inverse is meant to be it."""


def next_value(patch: Patch, finding: Finding, match_reference: bool = False) -> KnobValue:
    """The value to write instead, None where the fit is no positive number, or is right already."""
    told, fitted, target = patch.value, finding.candidate_value, target_value(finding, match_reference)
    if not all(is_number(value) and value > 0 for value in (told, fitted, target)):  # type: ignore[operator]
        return None
    if same(fitted, target, ROUND):
        return None
    return rounded(float(told) * float(target) / float(fitted))  # type: ignore[arg-type]


def rounded(value: float) -> float:
    """The whole number, or the inverse of one, that a value is within its rounding."""
    for near in (float(round(value)), 1.0 / round(1.0 / value) if round(1.0 / value) else 0.0):
        if near and same(value, near, ROUND):
            return near
    return value
