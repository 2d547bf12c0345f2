"""What a row of the table of knobs holds, and the kinds of values that a knob may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REAL, COUNT, CHOICE, FLAG, STRUCTURE, ROUNDING = "real", "count", "choice", "flag", "structure", "rounding"
"""A real number; a whole number; one of a few names; true or false; a value with parts of its own (a dictionary); or a place where
values are rounded to a narrow dtype."""


@dataclass(frozen=True)
class Knob:
    """One row.

    `meaning` is one sentence. `component` is the part of the decoder whose output the knob changes. `default` holds where a
    spec does not name it. `choices` are the values of a choice, `span` the ends between which a number is searched.
    `optional`: the knob may be absent (None). `confused_with`: knobs whose effect can look the same. `judged`: a program
    that departs from the default is wrong also where the spec is silent. `starts`: values with parts that a search begins
    from beside the model's own. `per_head`: the value may be a list with one number per head. `if_true`: the value that a
    spec means by `true`. `counted`: further values of a choice, with a whole number in the place of `{}`; `measured`: others
    with a real number there, which a search starts from the one beside them. `beside`: parts that a value with parts may
    have beside those that a model gives it. `same_function`: programs with any of its values compute the same. `by_part`:
    queries and keys may have values of their own.
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
