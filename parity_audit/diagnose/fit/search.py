"""Search the value of one knob with the smallest residual at a component.

Choices and flags are enumerated. Whole numbers are searched on a grid that is narrowed. Real numbers are searched by
Gauss-Newton (in the logarithm where the knob is positive) from the given value and, where that does not lead to
rounding, from the best point of a coarse grid. The parts of a dictionary are searched one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.agreement import is_number
from parity_audit.formulas.choices import AT_EVERY_LENGTH, FACTORS, OTHER_FORMULAS, and_more, number_in, with_number_in
from parity_audit.formulas.knob import COUNT, STRUCTURE, Knob

FLOAT64_RESIDUAL = 1e-10
"""The residual that float64 rounding may leave: measured 1e-15 to 1e-14. A number that is rounded to float32 leaves
1e-8."""
STEP = math.sqrt(FLOAT64_RESIDUAL)
"""The relative step of a numeric derivative. At this size the error of the step and the error of rounding are about
equal."""
STEPS, HALVINGS = 20, 6
"""Gauss-Newton: the largest number of steps, and of halvings of a step that raises the residual."""
GRID, ENUMERATED = 13, 256
"""Points of a grid, and the largest whole number up to which every value is tried instead. Heads and the components
of a head are at most this many, and the residual of a wrong number of rotated components has no slope towards the
right one."""

FIXED = ("step", "partial_rotary_factor", "beyond")
"""Parts of a dictionary that are not fitted and keep their start value: the result does not change smoothly with
them."""
COMPENSATED_PARTS = ("original_max_position_embeddings", "max_position_embeddings")
"""Parts of a dictionary that are held fixed where several parts are fitted together: thresholds or a factor can
compensate for them."""
LARGEST_LOG = math.log(torch.finfo(torch.float32).max)
"""The largest logarithm that a step may lead to: no constant is larger than float32 can hold."""
SAME_WITHIN = 1.1
"""Residuals whose ratio is at most this factor count as equal: in float32, values whose residuals differ by this
factor are less than a step of the dtype apart. A detection limit within this factor of the error size that was run
is not run again."""
DIGITS = (2, 3, 4, 5, 6, 7, 8)
"""Numbers of significant digits to try, fewest first: a constant in a config has few digits. All of them are needed
for a table that is computed in float32, which only the exact constant reproduces."""
Difference = Callable[[Any], "Tensor | None"]
Path = tuple["str | int", ...]
"""Where a number is in nested dictionaries and lists: a key or an index per level. For text, the template with `{}`
in place of the number."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A value, and the residual that it leaves."""

    value: Any
    residual: float


def named(row: Knob, difference: Difference, start: Any, limit: int) -> list[Fitted]:
    """Return the values of a knob that can be enumerated, without `start`, each with its residual; see `fitted` for
    the arguments."""
    return [at_value(difference, value) for value in _enumerated(row, start, limit)]


def fitted(
    row: Knob,
    difference: Difference,
    start: Any,
    limit: int,
    *,
    enough: float = FLOAT64_RESIDUAL,
    tried: Sequence[Fitted] | None = None,
    near: bool = False,
    alone: bool = True,
    smooth: Difference | None = None,
) -> Fitted:
    """Return the value of a knob that leaves the smallest residual.

    Args:
        row: the knob.
        difference: formula minus capture for a value of the knob, None where the value is impossible.
        start: the value that is assumed to be right.
        limit: the largest whole number that the knob can be in this model.
        enough: the residual that rounding leaves; a search that reaches it ends.
        tried: the result of `named`, where the caller has it.
        near: a real number is searched from its start value only, without a grid.
        alone: no other knob is wrong as well. Only then are the numbers of a list searched, of which there may be a
            hundred.
        smooth: the difference without the narrow rounding that this model applies to the knob's number. A small step in
            a number that is rounded changes nothing, so that derivatives need this function.
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
        if smooth is not None and tried[-1].residual > enough:
            nearest = _real(smooth, start, row.span, enough, near=near).value
            tried.append(with_few_digits(difference, nearest, positive=row.span[0] > 0))
    if limit > ENUMERATED:
        tried += [_narrowed(difference, words.format, limit, enough) for words in row.counted]
    if row.measured and min((one.residual for one in tried), default=math.inf) > enough:
        tried += _measured(row, difference, enough, alone=alone)
    best = min(tried, key=lambda one: one.residual, default=Fitted(value=start, residual=math.inf))
    # If a named value (for example no cap) leaves a residual within 1.1 times that of the fitted number (a cap of 5000), return
    # the named value; of several such named values, return the first.
    return next((one for one in by_name if one.residual <= max(SAME_WITHIN * best.residual, FLOAT64_RESIDUAL)), best)


def uncertainty(smooth: Difference, value: Any, off: Tensor) -> float | None:
    """Return the standard error of a real value whose difference is `off`, with all other knobs fixed: sqrt(sum off^2 /
    (n - 1)) / |d off / d value|.

    None if the value is no number or has no derivative here.

    Args:
        smooth: the difference for a value of the knob without any narrow rounding, which has no derivative.
        value: the value of the knob.
        off: formula minus capture at this value, flat.
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
    """Return whole numbers that a grid may miss because the residual has no slope towards them, as with the size of a
    chunk.

    These are the powers of two, and the neighbours of the number that is assumed to be right.
    """
    beside = {start - 1, start + 1} if is_number(start) else set()
    return sorted(count for count in {*beside, *(2**k for k in range(limit.bit_length()))} if 1 <= count <= limit)


def norm_of(off: Tensor | None) -> float:
    """Return the norm of a difference; infinite where there is no difference or its norm is not finite."""
    norm = math.inf if off is None else float(off.norm())
    return norm if math.isfinite(norm) else math.inf


def at_value(difference: Difference, value: Any) -> Fitted:
    """Return a value with the residual that it leaves."""
    return Fitted(value=value, residual=norm_of(difference(value)))


def _narrowed(difference: Difference, said: Callable[[int], Any], high: int, enough: float) -> Fitted:
    """Search a whole number from 1 on, or the choice that `said` makes of it, on a geometric grid narrowed round its
    best point."""
    low, best = 1, Fitted(value=said(1), residual=math.inf)
    within = 0, 0
    while within != (low, high) and best.residual > enough:
        within = low, high
        points = sorted({round(low * (high / low) ** (k / (GRID - 1))) for k in range(GRID)})
        found = [at_value(difference, said(point)) for point in points]
        at = min(range(len(points)), key=lambda k: found[k].residual)
        best = min(best, found[at], key=lambda one: one.residual)
        low, high = points[max(at - 1, 0)], points[min(at + 1, len(points) - 1)]
    return best


def _measured(row: Knob, difference: Difference, enough: float, *, alone: bool) -> list[Fitted]:
    """Return the fitted choices that contain a real number.

    A choice of `OTHER_FORMULAS` is returned only if it explains everything (a residual of at most `enough`), and is tried
    only if no other knob is wrong: beside another wrong knob it may lower the residual by chance.
    """
    asked = {words: first for words, first in row.measured.items() if alone or words not in OTHER_FORMULAS}
    found = {words: _in_words(difference, words, first) for words, first in asked.items()}
    return [one for words, one in found.items() if words not in OTHER_FORMULAS or one.residual <= enough]


def _in_words(difference: Difference, words: str, start: float) -> Fitted:
    """Fit the number of a choice with a real number, from a start value."""
    found = _gauss_newton(
        lambda number: difference(with_number_in(words, number)), start, positive=words in OTHER_FORMULAS
    )
    return Fitted(value=with_number_in(words, found.value), residual=found.residual)


def _real(difference: Difference, start: Any, span: tuple[float, float], enough: float, *, near: bool) -> Fitted:
    """Fit a real number: by Gauss-Newton from `start`, and from the best point of a grid over the span unless `near`
    is set."""
    low, high = span
    given = float(start) if is_number(start) else None
    found = Fitted(value=start, residual=math.inf)
    if given is not None and (given > 0 or low < 0):
        found = _gauss_newton(difference, given, positive=low > 0)
    if found.residual <= enough or (near and given is not None):
        return found
    grid = torch.linspace(0, 1, 2 * GRID - 1, dtype=torch.float64).tolist()
    points = [low * (high / low) ** t if low > 0 else low + (high - low) * t for t in grid]
    best = min((at_value(difference, point) for point in points), key=lambda one: one.residual)
    if math.isinf(best.residual):
        return found
    return min(found, _gauss_newton(difference, best.value, positive=low > 0), key=lambda one: one.residual)


def _gauss_newton(difference: Difference, start: float, *, positive: bool) -> Fitted:
    """Fit one number to the nearest minimum, and round it to the fewest digits that leave the same residual."""
    (value,), _ = gauss_newton(lambda values: difference(values[0]), (start,), (positive,))
    return with_few_digits(difference, value, positive=positive)


def with_few_digits(difference: Difference, value: float, *, positive: bool) -> Fitted:
    """Round a number to the fewest digits that leave the same residual; 0, where the knob can be 0, counts as
    fewest."""
    exact = at_value(difference, value)
    digits = [float(f"{value:.{digits}g}") for digits in DIGITS]
    short = (at_value(difference, number) for number in ([] if positive else [0.0]) + digits)
    # Values very near the constant leave the same residual; the constant is the one of them with the fewest digits.
    return next((one for one in short if one.residual <= max(SAME_WITHIN * exact.residual, FLOAT64_RESIDUAL)), exact)


def gauss_newton(
    difference: Callable[[Sequence[float]], Tensor | None], start: Sequence[float], positive: Sequence[bool]
) -> tuple[tuple[float, ...], float]:
    """Fit several numbers by Gauss-Newton: return the nearest minimum and its residual. A step that raises the residual
    is halved.

    Args:
        difference: formula minus capture for these numbers, None where they are impossible.
        start: the numbers from which the search starts.
        positive: which of the numbers are searched in the logarithm.
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
            break  # the derivative is not finite: the formula returns infinite numbers near this value
        step = torch.linalg.lstsq(squares, products, driver="gelsd").solution
        if float(step @ products) <= STEP**2 * float(off.square().sum()):
            break  # the gain of a step is below the error of the slopes; it is 0 if no number has an effect
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
    """Return the paths of the numbers in a dictionary: a key, and for a list a key and an index per entry."""
    found: list[Path] = []
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, list):
            found += [(key, place) for place in range(len(item))]
        elif is_number(item) and item > 0:
            found.append((key,))
    return found


def free_paths(value: Any) -> list[Path]:
    """Return the paths of the numbers in a dictionary that are fitted together; numbers in lists are not among them."""
    return [path for path in number_paths(value) if len(path) == 1 and path[0] not in (*FIXED, *COMPENSATED_PARTS)]


def with_number(value: Any, path: Path, number: float) -> Any:
    """Return a dictionary, list or text with the number at `path` replaced; the path may lead into nested
    dictionaries and lists."""
    if not path:
        return number
    if isinstance(value, str):
        return with_number_in(str(path[0]), number)
    made: Any = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = with_number(made[path[0]], path[1:], number)
    return made


def number_at(value: Any, path: Path) -> float:
    """Return the number at a path of a dictionary, list or text."""
    for step in path:
        value = number_in(value, str(step)) if isinstance(value, str) else value[step]
    return float(value)


def variants(start: Any) -> list[dict[str, Any]]:
    """Return a dictionary and its variants: with one of its booleans flipped, or, for LongRoPE, with one list of
    factors at all lengths."""
    if not isinstance(start, dict):
        return []
    flipped = [{**start, key: not part} for key, part in start.items() if isinstance(part, bool)]
    lists = [{**start, FACTORS: which} for which in AT_EVERY_LENGTH if "short_factor" in start]
    return [start, *flipped, *lists]


def _by_part(difference: Difference, start: dict[str, Any], *, lists: bool) -> list[Fitted]:
    """Return a dictionary with each of its numbers fitted in turn, the others fixed. Numbers in lists are fitted only
    if `lists` is set.

    The dictionary itself is returned if none of its numbers can be fitted.
    """
    paths = [path for path in number_paths(start) if path[0] not in FIXED and (lists or len(path) == 1)]
    return [_part(difference, start, path) for path in paths] or [at_value(difference, start)]


def _part(difference: Difference, start: dict[str, Any], path: Path) -> Fitted:
    """Fit one number of a dictionary, with the others fixed."""
    found = _gauss_newton(
        lambda number: difference(with_number(start, path, number)), number_at(start, path), positive=True
    )
    return Fitted(value=with_number(start, path, found.value), residual=found.residual)
