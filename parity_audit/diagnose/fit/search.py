"""The value of one knob that leaves least of a component.

Choices and flags are enumerated, whole numbers searched on a grid that is narrowed, real numbers by Gauss-Newton (in the
logarithm where the knob is positive) from the value that is given and, where that does not lead to rounding, from the
best point of a coarse grid. The parts of a dictionary are searched one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.agreement import is_number
from parity_audit.formulas.choices import AT_EVERY_LENGTH, FACTORS, OTHER_LAWS, and_more, number_in, with_number_in
from parity_audit.formulas.knob import COUNT, STRUCTURE, Knob

ROUNDING = 1e-10
"""What float64 rounding may leave of a component: measured 1e-15 to 1e-14; a number rounded to float32 leaves 1e-8."""
STEP = math.sqrt(ROUNDING)
"""The relative step of a numeric derivative: of it, the step's own error and that of rounding are about the same there."""
STEPS, HALVINGS = 20, 6
"""Gauss-Newton: at most so many steps, and halvings of a step that leads uphill."""
GRID, ENUMERATED = 13, 256
"""Points of a grid, and how many whole numbers are enumerated rather than searched: heads and the components of a head are at most
so many, and what a wrong number of rotated components leaves has no slope towards the right one."""

FIXED = ("step", "partial_rotary_factor", "beyond")
"""Parts that only take the values of their starts: what they make does not change smoothly with them."""
MADE_UP_FOR = ("original_max_position_embeddings", "max_position_embeddings")
"""Parts that are held where others are moved too: thresholds, or a factor, make up for them."""
LARGEST_LOG = math.log(torch.finfo(torch.float32).max)
"""The largest logarithm that a step may lead to: no constant is beyond float32."""
SAME_WITHIN = 1.1
"""Residuals whose ratio is within this factor are the same: in float32 values that leave 1.1 times as much are less than a
step of the dtype apart. A detection limit that is so near to the amount that was run is not run again."""
DIGITS = (2, 3, 4, 5, 6, 7, 8)
"""A constant in a config has few digits. A table that is computed in float32 is only reproduced by the very constant."""
Difference = Callable[[Any], "Tensor | None"]
Path = tuple["str | int", ...]
"""Where a number stands in dictionaries and lists: a key or a place in each; in words, the words with `{}` in its place."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A value and what it leaves."""

    value: Any
    left: float


def named(row: Knob, difference: Difference, start: Any, limit: int) -> list[Fitted]:
    """The values of a knob that can be enumerated, but for `start`, with what each leaves; see `fitted`."""
    return [at_value(difference, value) for value in _enumerated(row, start, limit)]


def fitted(
    row: Knob,
    difference: Difference,
    start: Any,
    limit: int,
    *,
    enough: float = ROUNDING,
    tried: Sequence[Fitted] | None = None,
    near: bool = False,
    alone: bool = True,
    smooth: Difference | None = None,
) -> Fitted:
    """The value of a knob that leaves least.

    Args:
        row: the knob.
        difference: formula minus capture for a value of the knob, None where the value is impossible.
        start: the value that is held to be right.
        limit: the largest whole number that the knob can be in this model.
        enough: what rounding leaves; a search that comes to it ends.
        tried: what `named` gives, where it is known.
        near: a real number is only searched from where it is.
        alone: no other knob is wrong as well; of a hundred numbers of a list one is only searched then.
        smooth: the difference without the narrow rounding that the knob's number goes through in this model: of a number that is
            rounded, a small step changes nothing.
    """
    by_name = named(row, difference, start, limit) if tried is None else tried
    tried = list(by_name)
    if row.kind == STRUCTURE:
        said = {key: word for key, word in (start or {}).items() if isinstance(word, str)}
        tried += [_part(difference, {**(start or {}), **row.beside}, (part,)) for part in row.beside]
        begun = [*variants(start), *({**said, **one} for one in row.starts)]
        if said:
            tried.append(at_value(difference, {key: part for key, part in start.items() if key not in said}))
        tried += [at_value(difference, one) for one in variants(start)[1:]]
        tried += [found for one in begun for found in _by_part(difference, one, lists=alone)]
    elif row.kind == COUNT and limit > ENUMERATED:
        tried += [at_value(difference, count) for count in _usual(start, limit)]
        tried.append(_narrowed(difference, int, limit, enough))
    elif row.span is not None and row.kind != COUNT:
        tried.append(_real(difference, start, row.span, enough, near=near))
        if smooth is not None and tried[-1].left > enough:
            nearest = _real(smooth, start, row.span, enough, near=near).value
            tried.append(shortened(difference, nearest, positive=row.span[0] > 0))
    if limit > ENUMERATED:
        tried += [_narrowed(difference, words.format, limit, enough) for words in row.counted]
    if row.measured and min((one.left for one in tried), default=math.inf) > enough:
        tried += _measured(row, difference, enough, alone=alone)
    best = min(tried, key=lambda one: one.left, default=Fitted(value=start, left=math.inf))
    # A number that comes as near as nobody can tell to one of the named values (a cap of thousands to no cap) is that value;
    # of named values that nobody can tell apart it is the first.
    return next((one for one in by_name if one.left <= max(SAME_WITHIN * best.left, ROUNDING)), best)


def uncertainty(smooth: Difference, value: Any, off: Tensor) -> float | None:
    """The standard error of a real value whose difference is `off`, others held: sqrt(sum off^2 / (n - 1)) / |d off / d value|.

    Args:
        smooth: the difference for a value of the knob without any narrow rounding, which has no derivative.
    """
    if not is_number(value):
        return None
    step = STEP * max(abs(value), 1e-9)
    at, beside = smooth(value), smooth(value + step)
    if at is None or beside is None or beside.shape != at.shape:
        return None
    slope = float((beside - at).norm()) / step
    spread = float(off.norm()) / max(off.numel() - 1, 1) ** 0.5
    return spread / slope if slope > 0 else math.inf


def _enumerated(row: Knob, start: Any, limit: int) -> Iterator[Any]:
    if row.choices:
        more = start if row.kind == COUNT and is_number(start) else None
        yield from (and_more(choice, more) for choice in row.choices if choice != start)
    for words in row.counted if limit <= ENUMERATED else ():
        yield from (words.format(count) for count in range(1, limit))
    if row.optional and start is not None:
        yield None
    if row.kind == COUNT and limit <= ENUMERATED:
        least = 0 if row.span is None else int(row.span[0])
        yield from (count for count in range(least, limit + 1) if count != start)


def _usual(start: Any, limit: int) -> list[int]:
    """Whole numbers that a grid would miss where what they leave has no slope, as a chunk's: powers of two, and the neighbours of
    the number that is held to be right."""
    beside = {start - 1, start + 1} if is_number(start) else set()
    return sorted(count for count in {*beside, *(2**k for k in range(limit.bit_length()))} if 1 <= count <= limit)


def norm_of(off: Tensor | None) -> float:
    """The norm of a difference, infinite where there is none and where it is not finite."""
    norm = math.inf if off is None else float(off.norm())
    return norm if math.isfinite(norm) else math.inf


def at_value(difference: Difference, value: Any) -> Fitted:
    """A value, and what it leaves."""
    return Fitted(value=value, left=norm_of(difference(value)))


def _narrowed(difference: Difference, said: Callable[[int], Any], high: int, enough: float) -> Fitted:
    """A whole number from 1 on, or the choice that is `said` with it, on a geometric grid that is narrowed round the best point."""
    low, best = 1, Fitted(value=said(1), left=math.inf)
    within = 0, 0
    while within != (low, high) and best.left > enough:
        within = low, high
        points = sorted({round(low * (high / low) ** (k / (GRID - 1))) for k in range(GRID)})
        found = [at_value(difference, said(point)) for point in points]
        at = min(range(len(points)), key=lambda k: found[k].left)
        best = min(best, found[at], key=lambda one: one.left)
        low, high = points[max(at - 1, 0)], points[min(at + 1, len(points) - 1)]
    return best


def _measured(row: Knob, difference: Difference, enough: float, *, alone: bool) -> list[Fitted]:
    """The choices with a real number. A law that is not the usual one is among them where it explains everything: beside another
    wrong knob it may come nearer as well, by chance."""
    asked = {words: first for words, first in row.measured.items() if alone or words not in OTHER_LAWS}
    found = {words: _in_words(difference, words, first) for words, first in asked.items()}
    return [one for words, one in found.items() if words not in OTHER_LAWS or one.left <= enough]


def _in_words(difference: Difference, words: str, start: float) -> Fitted:
    """A choice with a real number, from the one that is given."""
    found = _gauss_newton(lambda number: difference(with_number_in(words, number)), start, positive=words in OTHER_LAWS)
    return Fitted(value=with_number_in(words, found.value), left=found.left)


def _real(difference: Difference, start: Any, span: tuple[float, float], enough: float, *, near: bool) -> Fitted:
    """A real number within a span; where it is `near`, only from the one that is given."""
    low, high = span
    given = float(start) if is_number(start) else None
    found = Fitted(value=start, left=math.inf)
    if given is not None and (given > 0 or low < 0):
        found = _gauss_newton(difference, given, positive=low > 0)
    if found.left <= enough or (near and given is not None):
        return found
    grid = torch.linspace(0, 1, 2 * GRID - 1, dtype=torch.float64).tolist()
    points = [low * (high / low) ** t if low > 0 else low + (high - low) * t for t in grid]
    best = min((at_value(difference, point) for point in points), key=lambda one: one.left)
    if math.isinf(best.left):
        return found
    return min(found, _gauss_newton(difference, best.value, positive=low > 0), key=lambda one: one.left)


def _gauss_newton(difference: Difference, start: float, *, positive: bool) -> Fitted:
    """The nearest minimum in one number, written with as few digits as leave the same."""
    (value,), _ = together(lambda values: difference(values[0]), (start,), (positive,))
    return shortened(difference, value, positive=positive)


def shortened(difference: Difference, value: float, *, positive: bool) -> Fitted:
    """A number written with as few digits as leave the same: zero, where the knob can be zero, has none."""
    exact = at_value(difference, value)
    digits = [float(f"{value:.{digits}g}") for digits in DIGITS]
    short = (at_value(difference, number) for number in ([] if positive else [0.0]) + digits)
    # Values very near the constant leave the same rounding; of those the constant is told by its few digits.
    return next((one for one in short if one.left <= max(SAME_WITHIN * exact.left, ROUNDING)), exact)


def together(
    difference: Callable[[Sequence[float]], Tensor | None], start: Sequence[float], positive: Sequence[bool]
) -> tuple[tuple[float, ...], float]:
    """The nearest minimum in several numbers by Gauss-Newton, and what it leaves; a step that leads uphill is halved.

    Args:
        difference: formula minus capture for these numbers, None where they are impossible.
        positive: which numbers are searched in the logarithm.
    """

    def numbers(u: Tensor) -> tuple[float, ...]:
        return tuple(math.exp(x) if log else x for x, log in zip(u.tolist(), positive, strict=True))

    def at(u: Tensor) -> Tensor | None:
        return (
            difference(numbers(u))
            if all(abs(x) < LARGEST_LOG or not log for x, log in zip(u.tolist(), positive, strict=True))
            else None
        )

    u = torch.tensor([math.log(x) if log else x for x, log in zip(start, positive, strict=True)], dtype=torch.float64)
    off = at(u)
    for _ in range(STEPS):
        beside = [at(u + step) for step in STEP * torch.eye(len(u), dtype=torch.float64)]
        if off is None or any(one is None or one.shape != off.shape for one in beside):
            break
        slopes = torch.stack([one - off for one in beside if one is not None], -1) / STEP
        squares, products = slopes.mT @ slopes, slopes.mT @ off
        if not bool(squares.isfinite().all() & products.isfinite().all()):
            break  # a value beside which the formula makes infinite numbers has no slope
        step = torch.linalg.lstsq(squares, products, driver="gelsd").solution
        if float(step @ products) <= STEP**2 * float(off.square().sum()):
            break  # what a step gains is less than is known of the slopes; where no number has an effect it is nothing
        for _ in range(HALVINGS):
            trial = at(u - step)
            if trial is not None and trial.shape == off.shape and float(trial.norm()) < float(off.norm()):
                break
            step = step / 2
        else:
            break
        u, off = u - step, trial
    return numbers(u), math.inf if off is None else float(off.norm())


def number_paths(value: Any) -> list[Path]:
    """Where the numbers of a dictionary stand: a key, and for a list each of its places."""
    found: list[Path] = []
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, list):
            found += [(key, place) for place in range(len(item))]
        elif is_number(item) and item > 0:
            found.append((key,))
    return found


def free_paths(value: Any) -> list[Path]:
    """Where the numbers of a dictionary stand that are moved together: none of a list."""
    return [path for path in number_paths(value) if len(path) == 1 and path[0] not in (*FIXED, *MADE_UP_FOR)]


def with_number(value: Any, path: Path, number: float) -> Any:
    """A dictionary, list or words with one number replaced, that of a dictionary or list in it where the path goes on."""
    if not path:
        return number
    if isinstance(value, str):
        return with_number_in(str(path[0]), number)
    made: Any = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = with_number(made[path[0]], path[1:], number)
    return made


def number_at(value: Any, path: Path) -> float:
    """One number of a dictionary, list or words."""
    for step in path:
        value = number_in(value, str(step)) if isinstance(value, str) else value[step]
    return float(value)


def variants(start: Any) -> list[dict[str, Any]]:
    """A dictionary, and what it is with one of its truth values the other way; with LongRoPE's factors of one length at all."""
    if not isinstance(start, dict):
        return []
    flipped = [{**start, key: not part} for key, part in start.items() if isinstance(part, bool)]
    lists = [{**start, FACTORS: which} for which in AT_EVERY_LENGTH if "short_factor" in start]
    return [start, *flipped, *lists]


def _by_part(difference: Difference, start: dict[str, Any], *, lists: bool) -> list[Fitted]:
    """A dictionary with each of its numbers searched, those of lists too if so asked, the others as they are; itself where none of
    them can be searched."""
    paths = [path for path in number_paths(start) if path[0] not in FIXED and (lists or len(path) == 1)]
    return [_part(difference, start, path) for path in paths] or [at_value(difference, start)]


def _part(difference: Difference, start: dict[str, Any], path: Path) -> Fitted:
    """One number of a dictionary, the others as they are."""
    found = _gauss_newton(
        lambda number: difference(with_number(start, path, number)), number_at(start, path), positive=True
    )
    return Fitted(value=with_number(start, path, found.value), left=found.left)
