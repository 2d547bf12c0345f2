"""The row type of the table of knobs, and the kinds of values that a knob may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REAL, COUNT, CHOICE, FLAG, STRUCTURE, ROUNDING = "real", "count", "choice", "flag", "structure", "rounding"
"""The kinds of values: a real number; a whole number; one of a few names; true or false; a dictionary; a narrow dtype together with
the place where values are rounded to it."""


@dataclass(frozen=True)
class Knob:
    """One row of the table of knobs.

    - `meaning`: what the knob is, in one sentence.
    - `component`: the part of the decoder whose output the knob changes.
    - `default`: the value if a spec does not name the knob.
    - `choices`: the named values. `span`: the ends between which a number is searched.
    - `optional`: whether the knob may be absent (None).
    - `confused_with`: knobs whose effect can look the same.
    - `judged`: whether a program that departs from the default is wrong even if the spec does not name the knob.
    - `starts`: dictionaries from which a search starts, in addition to the model's own value.
    - `per_head`: whether the value may be a list with one number per head.
    - `if_true`: the value that a spec means by `true`.
    - `same_function`: whether programs compute the same function with any of the knob's values.
    - `beside`: keys that a dictionary may have in addition to those that the model gives it.
    - `counted`: further named values, with a whole number in the place of `{}`.
    - `measured`: further named values, with a real number in the place of `{}`, each with the number from which a search starts.
    - `by_part`: whether queries and keys may have different values.
    """

    name: str
    kind: str
    component: str
    meaning: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    span: tuple[float, float] | None = None
    optional: bool = False
    confused_with: tuple[str, ...] = ()
    judged: bool = False
    starts: tuple[dict[str, Any], ...] = ()
    per_head: bool = False
    if_true: Any = None
    same_function: bool = False
    beside: Mapping[str, Any] = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    by_part: bool = False
