"""Settings of one or several knobs that may explain a component: how much freedom each has, and where its numbers
are."""

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
"""By kind of knob, how many other values may explain as much: few for names, some for whole numbers, more for any
real number, most for a value with several parts. A choice that contains a real number counts like a value with
parts."""
FITTED_PER_PART = 2 * max(FREEDOM.values()) + 1
"""The freedom of a value that is fitted separately to each head, distance, token or pair: more than that of any two
other values."""
MOST_DIGITS = round(-math.log10(torch.finfo(torch.float32).resolution))
"""Significant digits that count of a number: float32 determines no more digits of a base or a threshold."""
BEAM = 4
"""Sets of one size, those with the smallest residuals, from which larger sets are built, and values of one set of
knobs that are kept while one probe cannot distinguish them. Twice as many sets have their numbers fitted: of two
equivalent laws, one may start further from its minimum."""
BIAS = "attention.bias"
"""The knob whose value has a number for each distance between query and key."""
Setting = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Values of one or several knobs, the residual that they leave, and other values of the same knobs that leave
    about as little."""

    values: Setting
    residual: float
    tied: tuple[Setting, ...] = ()


def freedom_rank(knob: str, value: Any) -> int:
    """Return how many other values of this kind would explain as much: of explanations with equal residuals, the
    least free comes first."""
    is_law = KNOBS[knob].kind == STRUCTURE and knob != BIAS and "inv_freq" not in (value or {})
    if (isinstance(value, (list, dict)) and not is_law) or value == OTHERS:
        return FITTED_PER_PART
    if value is None or value in KNOBS[knob].choices:
        return FREEDOM[CHOICE]
    return FREEDOM[STRUCTURE if words_of(knob, value) else KNOBS[knob].kind]


def words_of(knob: str, value: Any) -> list[str]:
    """Return the templates of a choice with a real number that `value` matches, with `{}` in place of the number;
    empty for other values."""
    return [words for words in KNOBS[knob].measured if isinstance(value, str) and number_in(value, words) is not None]


def digits_of(values: Setting, said: Setting) -> list[int]:
    """Return the number of digits of each number in a setting that differs from the spec's at the same place.

    The numbers in a config have few digits, so that fewer digits are more plausible. `said` has the spec's values.
    """
    kept = {spot: number_at(said, spot) for spot in spots_of(said)}
    numbers = {spot: number_at(values, spot) for spot in spots_of(values)}
    written = [f"{number:.{MOST_DIGITS}g}" for spot, number in numbers.items() if kept.get(spot) != number]
    return [len(number.partition("e")[0].replace(".", "").strip("0-")) for number in written]


def freedom_of(values: Setting, said: Setting) -> int:
    """Return the freedom of a setting, the sum over its values. A dictionary that differs from the spec's in one
    number counts as one number."""
    free = {knob: freedom_rank(knob, value) for knob, value in values.items()}
    for knob, value in values.items():
        if isinstance(value, dict) and isinstance(said[knob], dict) and free[knob] != FITTED_PER_PART:
            others = [key for key in {*value, *said[knob]} if value.get(key) != said[knob].get(key)]
            is_number_alone = (
                len(others) == 1 and is_number(value.get(others[0])) and is_number(said[knob].get(others[0]))
            )
            free[knob] = FREEDOM[REAL] if is_number_alone else free[knob]
    return sum(free.values())


def place_in_row(values: Setting) -> int:
    """Return how late a setting's choices come in the lists of their knobs, summed. A value that is not listed
    counts as last."""
    rows = [(KNOBS[knob].choices, value) for knob, value in values.items()]
    return sum(choices.index(value) if value in choices else len(choices) for choices, value in rows)


def has_numbers_per_part(one: Explanation) -> bool:
    """Return whether some value has a number fitted separately to each head, distance, token or pair."""
    return any(freedom_rank(knob, value) == FITTED_PER_PART for knob, value in one.values.items())


def left_of(one: Explanation) -> float:
    """Return the residual that an explanation leaves."""
    return one.residual


def is_choice(knob: str, value: Any) -> bool:
    """Return whether a value is one of the listed choices of its knob, or None."""
    return KNOBS[knob].kind in (CHOICE, FLAG) and value in (*KNOBS[knob].choices, None)


def is_positive(spot: Path) -> bool:
    """Return whether a number is searched in its logarithm.

    That holds for the numbers of a value with parts, and for knobs whose span lies above 0. It does not hold for the
    entries of a list that has one number per head.
    """
    row = KNOBS[str(spot[0])]
    if len(spot) > 1:
        return row.kind == STRUCTURE
    return row.span is not None and row.span[0] > 0


def _is_fitted(knob: str, value: Any) -> bool:
    """Return whether a value is a single number that Gauss-Newton fits."""
    row = KNOBS[knob]
    is_free = row.kind == REAL and row.span is not None and value not in row.choices
    return is_free and is_number(value) and (value > 0 or not is_positive((knob,)))


def spots_of(values: Setting) -> list[Path]:
    """Return the places of the numbers in a setting that Gauss-Newton fits."""
    single: list[Path] = [(knob,) for knob, value in values.items() if _is_fitted(knob, value)]
    listed = [(knob, value) for knob, value in values.items() if isinstance(value, list) and KNOBS[knob].kind != COUNT]
    laws = [
        (knob, value)
        for knob, value in values.items()
        if isinstance(value, dict) and freedom_rank(knob, value) != FITTED_PER_PART
    ]
    worded = [(knob, words) for knob, value in values.items() for words in words_of(knob, value)]
    return [
        *single, *worded, *((knob, place) for knob, value in listed for place in range(len(value))),
        *((knob, *path) for knob, value in laws for path in free_paths(value)),
    ]  # fmt: skip


def with_numbers(values: Setting, spots: Sequence[Path], numbers: Sequence[float]) -> dict[str, Any]:
    """Return the setting with these numbers written at these places."""
    made = dict(values)
    for spot, number in zip(spots, numbers, strict=True):
        made = with_number(made, spot, number)
    return made


def best_of_each(tried: Sequence[Explanation]) -> list[Explanation]:
    """Return the best setting of each set of knobs, and up to `BEAM` in all whose residuals are the same within
    `SAME_WITHIN`.

    Several are kept because two masks, for example, may have the same effect on one probe.
    """
    by_knobs: dict[tuple[frozenset[str], bool], list[Explanation]] = {}
    for one in sorted(tried, key=left_of):
        by_knobs.setdefault((frozenset(one.values), has_numbers_per_part(one)), []).append(one)
    return [
        one for alike in by_knobs.values() for one in alike[:BEAM] if one.residual <= SAME_WITHIN * alike[0].residual
    ]


def least(tried: Iterable[Explanation], count: int) -> list[Explanation]:
    """Return the `count` explanations with the smallest residuals."""
    return sorted(tried, key=left_of)[:count]


def starts_of(tried: Sequence[Explanation], whole: float, enough: float) -> list[Explanation]:
    """Return the settings from which larger sets are built.

    These are the `BEAM` settings with the smallest residuals, the best of each set of knobs, and the best setting with
    separate numbers per head, token or distance, all with a residual of at most `enough`. Of single knobs, every choice
    that changes the residual at all is added (`whole` is the residual of the spec's values): a choice that does not
    help alone may be needed in a set. Only one setting with separate numbers is kept, because so many numbers lower the
    residual whatever the cause is.
    """
    helping = [one for one in tried if one.residual <= enough and not has_numbers_per_part(one)]
    first = (one for one in tried if len(one.values) == 1 and one.residual != whole)
    choices = [one for one in first if all(is_choice(*item) for item in one.values.items())]
    listed = least((one for one in tried if one.residual <= enough and has_numbers_per_part(one)), 1)
    starts: list[Explanation] = []
    for one in (*least(best_of_each(helping), BEAM), *least(helping, BEAM), *listed, *choices):
        if one not in starts and one.residual < float("inf"):
            starts.append(one)
    return starts
