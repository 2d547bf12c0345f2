"""Values of one or several knobs that may explain a component: how free they are, and where their numbers stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parity_audit.diagnose.agreement import is_number
from parity_audit.diagnose.fit.search import SAME_WITHIN, Path, free_paths, number_at, with_number
from parity_audit.formulas.choices import OTHERS, number_in
from parity_audit.formulas.knob import CHOICE, COUNT, FLAG, REAL, ROUNDING, STRUCTURE
from parity_audit.formulas.knobs import KNOBS

FREEDOM = {FLAG: 0, CHOICE: 0, ROUNDING: 0, COUNT: 1, REAL: 2, STRUCTURE: 3}
"""By kind, how many other values may explain as much: few names, some whole numbers, any number, a law with numbers (as a choice
with a number in it is)."""
READ_OFF = 2 * max(FREEDOM.values()) + 1
"""The freedom of a value that is read off what it explains, more than that of any two others."""
MOST_DIGITS = round(-math.log10(torch.finfo(torch.float32).resolution))
"""Of a number that is not one of few digits: float32 tells no more of a base or a threshold."""
BEAM = 4
"""Sets of one size, those that leave least, from which larger ones are built, and values of one set that go on together where one
probe cannot tell them apart. Twice as many have their numbers fitted: of two laws that say the same, one may start further off."""
BIAS = "attention.bias"
"""The knob whose value has a number for each distance."""
Setting = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Values of one or several knobs, what they leave of a component, and others of the same knobs that leave about as little."""

    values: Setting
    residual: float
    tied: tuple[Setting, ...] = ()


def freedom(knob: str, value: Any) -> int:
    """How many other values would explain as much: the order in which explanations that leave the same are named."""
    is_law = KNOBS[knob].kind == STRUCTURE and knob != BIAS and "inv_freq" not in (value or {})
    if (isinstance(value, (list, dict)) and not is_law) or value == OTHERS:
        return READ_OFF
    if value is None or value in KNOBS[knob].choices:
        return FREEDOM[CHOICE]
    return FREEDOM[STRUCTURE if words_of(knob, value) else KNOBS[knob].kind]


def words_of(knob: str, value: Any) -> list[str]:
    """The words of a choice with a real number, with `{}` in its place; none of any other value."""
    return [words for words in KNOBS[knob].measured if isinstance(value, str) and number_in(value, words) is not None]


def digits_of(values: Setting, said: Setting) -> list[int]:
    """How many digits each number of a setting has that is not `said` in the same place: the numbers of a config have few."""
    kept = {spot: number_at(said, spot) for spot in spots_of(said)}
    numbers = {spot: number_at(values, spot) for spot in spots_of(values)}
    written = [f"{number:.{MOST_DIGITS}g}" for spot, number in numbers.items() if kept.get(spot) != number]
    return [len(number.partition("e")[0].replace(".", "").strip("0-")) for number in written]


def freedom_of(values: Setting, said: Setting) -> int:
    """The freedom of a setting: that of its values, where what is said with one number changed is one number."""
    free = {knob: freedom(knob, value) for knob, value in values.items()}
    for knob, value in values.items():
        if isinstance(value, dict) and isinstance(said[knob], dict) and free[knob] != READ_OFF:
            others = [key for key in {*value, *said[knob]} if value.get(key) != said[knob].get(key)]
            is_number_alone = (
                len(others) == 1 and is_number(value.get(others[0])) and is_number(said[knob].get(others[0]))
            )
            free[knob] = FREEDOM[REAL] if is_number_alone else free[knob]
    return sum(free.values())


def place_in_row(values: Setting) -> int:
    """How far behind in their rows the names of choices stand; those with a number come last."""
    rows = [(KNOBS[knob].choices, value) for knob, value in values.items()]
    return sum(choices.index(value) if value in choices else len(choices) for choices, value in rows)


def has_parts(one: Explanation) -> bool:
    """Whether some value is read off what it explains: a number for each head, distance, token or pair."""
    return any(freedom(knob, value) == READ_OFF for knob, value in one.values.items())


def left_of(one: Explanation) -> float:
    """What an explanation leaves."""
    return one.residual


def is_choice(knob: str, value: Any) -> bool:
    """Whether a value is one of a few."""
    return KNOBS[knob].kind in (CHOICE, FLAG) and value in (*KNOBS[knob].choices, None)


def is_positive(spot: Path) -> bool:
    """Whether a number is searched in the logarithm: those of laws, and where nothing below 0 is in the span; none of a list."""
    row = KNOBS[str(spot[0])]
    if len(spot) > 1:
        return row.kind == STRUCTURE
    return row.span is not None and row.span[0] > 0


def _is_fitted(knob: str, value: Any) -> bool:
    """Whether a value is a number that Gauss-Newton moves."""
    row = KNOBS[knob]
    is_free = row.kind == REAL and row.span is not None and value not in row.choices
    return is_free and is_number(value) and (value > 0 or not is_positive((knob,)))


def spots_of(values: Setting) -> list[Path]:
    """The numbers of a setting that Gauss-Newton moves."""
    single: list[Path] = [(knob,) for knob, value in values.items() if _is_fitted(knob, value)]
    listed = [(knob, value) for knob, value in values.items() if isinstance(value, list) and KNOBS[knob].kind != COUNT]
    laws = [
        (knob, value) for knob, value in values.items() if isinstance(value, dict) and freedom(knob, value) != READ_OFF
    ]
    worded = [(knob, words) for knob, value in values.items() for words in words_of(knob, value)]
    return [
        *single, *worded, *((knob, place) for knob, value in listed for place in range(len(value))),
        *((knob, *path) for knob, value in laws for path in free_paths(value)),
    ]  # fmt: skip


def with_numbers(values: Setting, spots: Sequence[Path], numbers: Sequence[float]) -> dict[str, Any]:
    """The setting with these numbers in these places."""
    made = dict(values)
    for spot, number in zip(spots, numbers, strict=True):
        made = with_number(made, spot, number)
    return made


def best_of_each(tried: Sequence[Explanation]) -> list[Explanation]:
    """Of sets of the same knobs the one that leaves least, and a few that leave as little: on one probe two masks may be alike."""
    by_knobs: dict[tuple[frozenset[str], bool], list[Explanation]] = {}
    for one in sorted(tried, key=left_of):
        by_knobs.setdefault((frozenset(one.values), has_parts(one)), []).append(one)
    return [
        one for alike in by_knobs.values() for one in alike[:BEAM] if one.residual <= SAME_WITHIN * alike[0].residual
    ]


def least(tried: Iterable[Explanation], count: int) -> list[Explanation]:
    """Those that leave least."""
    return sorted(tried, key=left_of)[:count]


def starts_of(tried: Sequence[Explanation], whole: float, enough: float) -> list[Explanation]:
    """What is held while another knob is searched: what helps most (of each knob and of all values) and, as the first of a set,
    every choice that makes a difference to the `whole`, which the spec's values leave. A value with a number for each head leaves
    less than others whatever is wrong: of those the one that helps most."""
    helping = [one for one in tried if one.residual <= enough and not has_parts(one)]
    first = (one for one in tried if len(one.values) == 1 and one.residual != whole)
    choices = [one for one in first if all(is_choice(*item) for item in one.values.items())]
    listed = least((one for one in tried if one.residual <= enough and has_parts(one)), 1)
    starts: list[Explanation] = []
    for one in (*least(best_of_each(helping), BEAM), *least(helping, BEAM), *listed, *choices):
        if one not in starts and one.residual < float("inf"):
            starts.append(one)
    return starts
