"""Decide whether two values of a constant are equal: numbers up to float32 rounding, activations by their function,
RoPE scalings by their frequencies."""

from __future__ import annotations

import math
from typing import Any

from parity_audit.formulas.activations import canonical
from parity_audit.formulas.frequencies import rope_table

SAME = 1e-6
"""Relative tolerance: configs give constants with six to eight digits, and float32 holds seven."""
LENGTH = 1 << 17
"""Context length in tokens at which scalings are compared: long enough for those that depend on it to apply."""


def same(knob: str, one: Any, other: Any, d_head: int, d_rot: int) -> bool:
    """Whether an engine's value of a knob equals the spec's, in one layer."""
    if knob == "mlp.activation":
        return canonical(one) == canonical(other)
    if knob == "rope.scaling":
        return same_numbers(_frequencies(one, d_rot), _frequencies(other, d_rot))
    if knob == "rope.partial":
        return (one or d_head) == (other or d_head)
    return same_numbers(one, other)


def same_numbers(one: Any, other: Any) -> bool:
    """Whether two values are equal: numbers up to rounding, lists item by item."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_numbers, one, other))
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=SAME)
    return bool(one == other)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _frequencies(scaling: dict[str, Any] | None, d_rot: int) -> list[float]:
    """The rotary frequencies that a scaling gives for base 10000; scalings with equal frequencies are equal."""
    return rope_table(10000.0, scaling, d_rot, LENGTH)
