"""The knob values that explain one site of one side: one knob, or two or three that are wrong together.

Every knob that the site's formula asks for is searched alone. Where none leaves rounding, sets of knobs are built up: the
values that help most, and every other choice (a wrong pairing hides what a wrong base makes), are each held while the
other knobs are searched, and the numbers of a set are then fitted together. A set is an explanation by the same measure
as one knob: it leaves rounding. A smaller set comes before a larger one, and of equal ones the one with least freedom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.agreement import is_number
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values, largest, with_value
from parity_audit.diagnose.fit.search import EQUALLY, Difference, fitted, named, shortened, together
from parity_audit.diagnose.thresholds import CLEAR, TIED
from parity_audit.formulas.knobs import CHOICE, COUNT, FLAG, KNOBS, OTHERS, REAL, ROUNDING, STRUCTURE

MORE_ON_ALL = 10.0
"""What a value that was found on the smallest probe may leave there, over what rounding may leave: it is polished on all."""
FREEDOM = {FLAG: 0, CHOICE: 0, ROUNDING: 0, COUNT: 1, REAL: 2, STRUCTURE: 3}
LAST = 4
"""The freedom of a value that is read off what it explains, more than that of all others."""
MOST_KNOBS = 3
"""Knobs that are searched together at one site. The knobs of a site are few, and each one more multiplies the search."""
BEAM = 4
"""Sets of one size from which larger ones are built: those that leave least."""
ALIKE = 3
"""Values of the same knobs that go on together where one probe cannot tell them apart."""
POLISHED = 8
"""Sets of each size whose numbers are fitted together: of two laws that say the same, one may start further from rounding."""
STILL_WRONG = 0.1
"""Of the numbers that are wrong without a narrow dtype, the share that the right place of one leaves wrong: those near the middle of
two of its numbers. A wrong place leaves most of them wrong."""
HELPS = 0.9
"""A value is held while another is searched where it leaves at most this share of what is left without it."""

Setting = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Values of one or several knobs, and what they leave of a component."""

    values: Setting
    residual: float


def under(residuals: Residuals, setting: Setting, layer: int | None) -> Values:
    """The spec's values with those of a setting instead, where a component of this layer reads them."""
    values = residuals.decoder.values
    for knob, value in setting.items():
        values = with_value(residuals, values, knob, value, layer)
    return values


def asked(residuals: Residuals, component: Component, setting: Setting | None = None) -> frozenset[str]:
    """The knobs that a component's formula asks for under the spec's values, or under a setting."""
    return residuals.asked(component, under(residuals, setting or {}, component.layer))


def joined(residuals: Residuals, parts: Sequence[Component], values: Values | None = None) -> Tensor | None:
    """The differences of several probes in one, so that its norm is their root mean square; None where one cannot be."""
    made = [residuals.difference(part, residuals.decoder.values if values is None else values) for part in parts]
    if any(one is None for one in made):
        return None
    every: Tensor = torch.cat([one.flatten() for one in made if one is not None])
    scaled: Tensor = every / len(made) ** 0.5
    return scaled


def residual(residuals: Residuals, parts: Sequence[Component], values: Values | None = None) -> float:
    """The norm of `joined`, infinite where there is none."""
    off = joined(residuals, parts, values)
    return float("inf") if off is None or not bool(off.isfinite().all()) else float(off.norm())


def explains(residuals: Residuals, parts: Sequence[Component], one: Explanation, limit: float) -> bool:
    """Whether values explain these components, of which they leave `one.residual`: no more than rounding, which is `limit`.

    A narrow dtype inside a component is not computed again to the last bit everywhere, since a number near the middle of two falls
    to either side, and a token's size with it. It explains a component where, beside the same setting without it and beside the
    spec's values, it reproduces nearly all numbers that are wrong, or leaves clearly less and no more numbers wrong.
    """
    exact = {knob: value for knob, value in one.values.items() if KNOBS[knob].kind != ROUNDING}
    if one.residual <= limit or len(exact) == len(one.values):
        return one.residual <= limit
    off, *others = (
        joined(residuals, parts, under(residuals, values, parts[0].layer)) for values in (one.values, exact, {})
    )
    if off is None or not bool(off.isfinite().all()):
        return False
    shown = [other for other in others if other is not None and other.shape == off.shape]
    if not shown:
        return False
    without = min(shown, key=lambda other: float(other.norm()))
    wrong, before = (int((x.abs() > MORE_ON_ALL * limit / len(x) ** 0.5).sum()) for x in (off, without))
    return wrong <= STILL_WRONG * before or (wrong <= before and one.residual * CLEAR <= float(without.norm()))


def difference_of(residuals: Residuals, parts: Sequence[Component], knob: str, held: Setting) -> Difference:
    """The differences of all parts for a value of one knob, while others are held."""
    layer = parts[0].layer
    return lambda value: joined(residuals, parts, under(residuals, {**held, knob: value}, layer))


def explanations(residuals: Residuals, parts: Sequence[Component], limit: float, floor: float) -> list[Explanation]:
    """Everything that leaves rounding, the best first: one knob where there is one, else the smallest sets.

    Args:
        residuals: the side that departs.
        parts: the site in every probe that shows it.
        limit: what rounding may leave.
        floor: what rounding leaves on the side that is right.
    """
    search = _Search(residuals=residuals, parts=parts, limit=limit)
    found: list[Explanation] = []
    for several in search.by_size():
        found = [one for one in several if explains(residuals, parts, one, limit)]
        if found:
            break
    alike = TIED * max(min((one.residual for one in found), default=0.0), floor)
    return sorted(found, key=lambda one: _order(one, alike, residuals.decoder.values))


def _order(one: Explanation, alike: float, said: Collection[str]) -> tuple[bool, int, int]:
    """What comes first: what leaves as little as the best, choices before numbers, knobs that the spec names.

    That a model has none of what a knob says is a choice, whatever else its value could be.
    """
    freedom = sum(LAST if value == OTHERS else FREEDOM[CHOICE if value is None else KNOBS[knob].kind]
                  for knob, value in one.values.items())  # fmt: skip
    return one.residual > alike, freedom, sum(knob not in said for knob in one.values)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """One site on one side. Values are searched on its smallest probe, then polished on all."""

    residuals: Residuals
    parts: Sequence[Component]
    limit: float

    @property
    def small(self) -> Component:
        return min(self.parts, key=lambda part: part.probe.shape[0] * part.probe.shape[1])

    def by_size(self) -> Iterator[list[Explanation]]:
        """Sets of one knob, then of two and more; what is far from rounding on the smallest probe is not tried on all."""
        whole = self._left_by({}, [self.small])
        tried = list(self._with_one_more(whole))
        yield self._on_all(_best_of_each(tried))
        for _ in range(2, MOST_KNOBS + 1):
            starts = _starts(tried, HELPS * whole.residual)
            if not starts:
                return
            grown = [more for start in starts for more in self._with_one_more(start) if more.residual < start.residual]
            tried = [self._polished(one, [self.small]) for one in _least(_best_of_each(grown), POLISHED)]
            yield self._on_all(tried)

    def _with_one_more(self, start: Explanation) -> Iterator[Explanation]:
        """Every knob that the formula asks for beside those of a set: its best value, and its other named values."""
        for knob in sorted(asked(self.residuals, self.small, start.values) - set(start.values)):
            row, own = KNOBS[knob], self.residuals.decoder.knob(knob, self.small.layer)
            difference = difference_of(self.residuals, [self.small], knob, start.values)
            most = largest(self.residuals, self.small, knob)
            others = named(row, difference, own, most)
            best = fitted(row, difference, own, most, tried=others, enough=self.limit)
            for one in (best, *(other for other in others if other.value != best.value)):
                yield Explanation(values={**start.values, knob: one.value}, residual=one.left)

    def _on_all(self, tried: Iterable[Explanation]) -> list[Explanation]:
        return [self._polished(one, self.parts) for one in tried if self._is_near(one)]

    def _is_near(self, one: Explanation) -> bool:
        """Whether a setting may explain the component, by the smallest probe alone."""
        return explains(self.residuals, [self.small], one, MORE_ON_ALL * self.limit)

    def _polished(self, one: Explanation, parts: Sequence[Component]) -> Explanation:
        """The nearest minimum in all numbers of a set together, each with as few digits as leave the same."""
        layer, values = parts[0].layer, dict(one.values)
        numbers = [knob for knob, value in values.items() if _is_fitted(knob, value)]

        def difference(these: Sequence[float]) -> Tensor | None:
            return joined(
                self.residuals, parts, under(self.residuals, values | dict(zip(numbers, these, strict=True)), layer)
            )

        if numbers:
            at, _ = together(
                difference, [float(values[knob]) for knob in numbers], [_is_positive(knob) for knob in numbers]
            )
            values |= dict(zip(numbers, at, strict=True))
        for knob in numbers:
            own = difference_of(self.residuals, parts, knob, values)
            values[knob] = shortened(own, values[knob], positive=_is_positive(knob)).value
        return min((self._left_by(one.values, parts), self._left_by(values, parts)), key=_left)

    def _left_by(self, values: Setting, parts: Sequence[Component]) -> Explanation:
        left = residual(self.residuals, parts, under(self.residuals, values, parts[0].layer))
        return Explanation(values=values, residual=left)


def _starts(tried: Sequence[Explanation], enough: float) -> list[Explanation]:
    """What is held while another knob is searched: what helps most (of each knob and of all values) and, as the first of a set,
    every choice."""
    helping = [one for one in tried if one.residual <= enough]
    choices = [one for one in tried if len(one.values) == 1 and all(_is_choice(knob) for knob in one.values)]
    starts: list[Explanation] = []
    for one in (*_least(_best_of_each(helping), BEAM), *_least(helping, BEAM), *choices):
        if one not in starts and one.residual < float("inf"):
            starts.append(one)
    return starts


def _left(one: Explanation) -> float:
    return one.residual


def _is_choice(knob: str) -> bool:
    return KNOBS[knob].kind in (CHOICE, FLAG)


def _is_positive(knob: str) -> bool:
    span = KNOBS[knob].span
    return span is not None and span[0] > 0


def _is_fitted(knob: str, value: Any) -> bool:
    """Whether a value is a number that Gauss-Newton moves."""
    row = KNOBS[knob]
    return row.kind == REAL and row.span is not None and is_number(value) and (value > 0 or not _is_positive(knob))


def _best_of_each(tried: Sequence[Explanation]) -> list[Explanation]:
    """Of sets of the same knobs the one that leaves least, and a few that leave as little: on one probe two masks may be alike."""
    by_knobs: dict[frozenset[str], list[Explanation]] = {}
    for one in sorted(tried, key=_left):
        by_knobs.setdefault(frozenset(one.values), []).append(one)
    return [one for alike in by_knobs.values() for one in alike[:ALIKE] if one.residual <= EQUALLY * alike[0].residual]


def _least(tried: Iterable[Explanation], count: int) -> list[Explanation]:
    return sorted(tried, key=_left)[:count]
