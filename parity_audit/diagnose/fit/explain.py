"""Find the knob values that explain one site of one side: one knob, or two or three that are wrong together.

Every knob that the site's formula asks for is searched alone. If none leaves only rounding, sets of the values that the spec gives
to layers of another kind are tried, then rotary frequencies. Then larger sets are built: the settings with the smallest residuals,
and every other choice that changes the residual (a wrong pairing hides what a wrong base does), are each fixed while the other
knobs are searched, and the numbers of a set are fitted together. A set explains the site by the same test as one knob: it leaves
rounding. Smaller sets come before larger ones, and of equal sets the one with the least freedom comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from torch import Tensor

from parity_audit.core.sites import local_name
from parity_audit.diagnose.agreement import is_number
from parity_audit.diagnose.fit.by_head import biases_by_distance, one_per_head
from parity_audit.diagnose.fit.by_pair import SCALING, THETA, Layout, laws, read_off, sharpened
from parity_audit.diagnose.fit.by_token import first_wrong, positions_one_by_one, where_it_differs
from parity_audit.diagnose.fit.residuals import OF_EACH_TOKEN, Component, Residuals, Values, largest
from parity_audit.diagnose.fit.search import (
    SAME_WITHIN,
    Difference,
    Fitted,
    Path,
    at_value,
    fitted,
    gauss_newton,
    named,
    number_at,
    with_few_digits,
    with_number,
)
from parity_audit.diagnose.fit.settings import (
    BEAM,
    BIAS,
    Explanation,
    Setting,
    best_of_each,
    digits_of,
    freedom_of,
    is_positive,
    least,
    place_in_row,
    spots_of,
    starts_of,
    with_numbers,
)
from parity_audit.diagnose.fit.site_residual import (
    COARSE_RESIDUAL,
    MORE_ON_ALL,
    combined_difference,
    difference_of,
    explains,
    knobs_asked,
    residual,
    values_with_setting,
    with_residual,
    without_rounding,
)
from parity_audit.diagnose.thresholds import TIED
from parity_audit.formulas.choices import MISSING, QUERY_KEY_PARTS
from parity_audit.formulas.frequencies import attention_factor
from parity_audit.formulas.knob import ROUNDING
from parity_audit.formulas.knobs import KNOBS, for_queries_or_keys
from parity_audit.formulas.place import Decoder

MOST_KNOBS = 3
"""The largest number of knobs searched together at one site. The knobs of a site are few, and each one more multiplies the
search."""
OF_A_KIND = 6
"""The largest number of knobs by which two kinds of layers may differ at a site for all sets of them to be tried: 57 sets at
most."""
OF_DECODING = ("cache.", "rope.offset", "pos_embed.offset")
"""Prefixes of knobs that may have other values in decoding than in whole runs."""
AFTER = {"rot_q": "q", "rot_k": "k"}
"""Which of queries and keys is rotated, by the site that holds them after the rotation."""

GROWTH, STATE = "attention.temperature_by_position", "delta.chunk"
POSITIONS = ("rope.offset", "pos_embed.offset")
"""The knobs whose value may be given token by token."""
LAYOUT = ("rope.first_dim", "rope.partial", "rope.pairing")
"""Knobs that determine which components of a head are rotated together."""


def explanations(residuals: Residuals, parts: Sequence[Component], limit: float, floor: float) -> list[Explanation]:
    """Return every setting that leaves only rounding at a site, the best first: single knobs if there are any, else the
    smallest sets.

    Args:
        residuals: the side that departs.
        parts: the site in every probe that shows it.
        limit: the residual that rounding may leave.
        floor: the residual that rounding leaves on the side that is right.
    """
    small = _smallest_wrong(residuals, parts, limit)
    search = _Search(
        residuals=residuals, parts=parts, small=small, limit=limit, short=_right_in_short(residuals, parts, small, limit)
    )  # fmt: skip
    found: list[Explanation] = []
    for several in search.by_size():
        found = [one for one in several if explains(residuals, parts, one, limit)]
        if found:
            break
    alike = TIED * max(min((one.residual for one in found), default=0.0), floor)
    return _ranked(found, lambda one: _order(one, alike, residuals.decoder, parts[0]))


def _smallest_wrong(
    residuals: Residuals, parts: Sequence[Component], limit: float, values: Values | None = None
) -> Component:
    """Return the smallest probe in which values leave more than rounding; if there is none, the smallest of all."""
    wrong = [part for part in parts if residual(residuals, [part], values) > limit]
    return min(wrong or parts, key=_tokens_of)


def _right_in_short(
    residuals: Residuals, parts: Sequence[Component], small: Component, limit: float
) -> Component | None:
    """Return the shortest probe in which the spec's values leave rounding, restricted to the sites that the long probe captures.
    None if there is no such probe, or if the probe that shows the error is itself short."""
    if small.probe.sites == "all":
        return None
    whole = [part for part in parts if part.probe.sites == "all" and part.probe.decode_from is None]
    short = [replace(part, seen_in=small.probe.name) for part in whole]
    right = [part for part in short if residual(residuals, [part]) <= limit]
    return min(right, key=_tokens_of, default=None)


def _tokens_of(part: Component) -> int:
    return part.probe.shape[0] * part.probe.shape[1]


def _ranked(found: Sequence[Explanation], order: Callable[[Explanation], tuple[float, ...]]) -> list[Explanation]:
    """Sort explanations by `order`, then by residual; choices of the same knobs with equal order are sorted as their knobs
    list them."""
    least_left: dict[tuple[object, ...], float] = {}
    for one in found:
        alike = (frozenset(one.values), order(one))
        least_left[alike] = min(one.residual, least_left.get(alike, one.residual))
    return sorted(
        found, key=lambda one: (*order(one), least_left[frozenset(one.values), order(one)], place_in_row(one.values))
    )


def _order(one: Explanation, alike: float, spec: Decoder, part: Component) -> tuple[bool, int, int, int]:
    """Return the sort key of an explanation: whether it leaves more than `alike`, its freedom, knobs that the spec lacks, digits.

    An error that only decoded tokens show is one of the cache or of positions rather than of a mask, so knobs of these come first
    there. A missing tensor (`MISSING`) comes before other values: it is a choice, whatever else the value could be.
    """
    said = said_of(one.values, spec, part.layer)
    unsaid = sum(-1 if value == MISSING else knob not in spec.values for knob, value in one.values.items())
    is_of_decoding = part.probe.decode_from is not None and any(knob.startswith(OF_DECODING) for knob in one.values)
    free, digits = freedom_of(one.values, said), sum(digits_of(one.values, said))
    return one.residual > alike, free, -1 if is_of_decoding else unsaid, digits


def said_of(values: Setting, spec: Decoder, layer: int | None) -> Setting:
    """Return the spec's values of the knobs in a setting."""
    return {knob: spec.knob(knob, layer) for knob in values}


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The search at one site on one side: values are searched on the smallest probe with an error, then fitted on all
    probes."""

    residuals: Residuals
    parts: Sequence[Component]
    small: Component
    limit: float
    short: Component | None = None
    """If a long text shows the error: a short probe of the same captured sites in which the spec's values are right."""
    on_small_alone: list[Explanation] = field(default_factory=list)
    """Settings that leave rounding in the smallest probe but more in the others."""

    def by_size(self) -> Iterator[list[Explanation]]:
        """Yield settings of one knob, then of two and more. Those far from rounding on the smallest probe are not tried on
        all."""
        whole = with_residual(self.residuals, [self.small], {})
        tried = list(self._with_one_more(whole))
        yield self._on_all(best_of_each(tried))
        yield from self._beyond_the_small()
        for several in self._as_other_layers():
            yield self._on_all(several)
        yield self._on_all(self._by_frequencies())
        for size in range(2, MOST_KNOBS + 1):
            starts = starts_of(tried, whole.residual, whole.residual / SAME_WITHIN)
            if not starts:
                return
            grown = [(start, more) for start in starts for more in self._with_one_more(start)]
            better = [more for start, more in grown if more.residual < start.residual]
            # If two wrong numbers compensate each other, changing one alone does not help: they have to be fitted together.
            level = [
                more for start, more in grown if more.residual == start.residual and len(spots_of(more.values)) == size
            ]
            chosen = [*least(best_of_each(better), 2 * BEAM), *least(best_of_each(level), BEAM)]
            tried = [self._polished(one, [self.small]) for one in chosen]
            yield self._on_all(tried)
            yield from self._beyond_the_small()

    def _with_one_more(self, start: Explanation) -> Iterator[Explanation]:
        """Yield a setting with one more knob that the formula asks for: the knob's best value and its other named values."""
        beside_numbers = bool(spots_of(start.values))
        known = knobs_asked(self.residuals, self.small, start.values)
        full = without_rounding(self.residuals, self.small.layer, start.values, known)
        for knob in sorted(known - set(start.values)):
            if KNOBS[knob].kind == ROUNDING and start.values and start.residual > COARSE_RESIDUAL:
                continue
            row, own = KNOBS[knob], self.residuals.decoder.knob(knob, self.small.layer)
            difference = self._where_short_is_right(knob, start.values)
            if knob == GROWTH:
                difference = where_it_differs(difference, self.residuals.places(self.small))
            most = largest(self.residuals, self.small, knob)
            others = named(row, difference, own, 0 if start.values and row.counted else most)
            if self.small.probe.decode_from is not None:  # if it were absent, whole runs would show it
                others = [other for other in others if other.value is not None]
            best = fitted(
                row, difference, own, most, tried=others, enough=self.limit, near=beside_numbers, alone=not start.values,
                smooth=difference_of(self.residuals, [self.small], knob, {**start.values, **full}) if full else None,
            )  # fmt: skip
            more = [] if start.values else self._with_parts(knob, difference, [best, *others])
            for one in (best, *(other for other in others if other.value != best.value), *more):
                yield Explanation(values={**start.values, knob: one.value}, residual=one.residual)

    def _where_short_is_right(self, knob: str, held: Setting) -> Difference:
        """Return the difference of the smallest probe for a value of one knob; None for a value that the short probe refutes,
        which is 300 times cheaper to compute."""
        difference, short = difference_of(self.residuals, [self.small], knob, held), self.short
        if short is None:
            return difference
        in_short = difference_of(self.residuals, [short], knob, held)

        def of(value: Any) -> Tensor | None:
            off = in_short(value)
            is_refuted = off is not None and float(off.norm()) > MORE_ON_ALL * self.limit
            return None if is_refuted else difference(value)

        return of

    def _with_parts(self, knob: str, difference: Difference, tried: Sequence[Fitted]) -> list[Fitted]:
        """Return values with a number per head, distance or token, or with separate entries for queries and keys."""
        row, dims, best = KNOBS[knob], self.residuals.decoder.dims, min(tried, key=lambda one: one.residual)
        if best.residual <= self.limit:
            return self._of_this_part(knob, tried)
        is_alone = local_name(self.small.site) in OF_EACH_TOKEN and self.small.probe.decode_from is None
        if knob in POSITIONS and is_alone:
            # The short probe is not asked here: the positions of its few tokens do not determine those of later ones.
            each = difference_of(self.residuals, [self.small], knob, {})
            more = self.residuals.decoder.knob(knob, self.small.layer)
            own = positions_one_by_one(each, self.residuals.places(self.small), int(more) if is_number(more) else 0)
            return [at_value(difference, value) for value in own]
        if knob == STATE:
            off = difference(self.residuals.decoder.knob(knob, self.small.layer))
            place = (
                None if off is None else first_wrong(off, self.residuals.places(self.small), MORE_ON_ALL * self.limit)
            )
            return [] if place is None else [at_value(difference, place)]
        if row.per_head:
            return list(one_per_head(row, difference, best.value, dims["n_heads"], dims["n_kv_heads"]))
        if knob != BIAS:
            return []
        biases = biases_by_distance(self.residuals, self.parts, self.residuals.decoder.values)
        tried = [at_value(difference, bias) for bias in biases]
        nearest = min((one.residual for one in tried), default=0.0)
        return [one for one in tried if one.residual <= SAME_WITHIN * nearest][:1]

    def _of_this_part(self, knob: str, tried: Sequence[Fitted]) -> list[Fitted]:
        """Return the values that explain queries or keys as values of that part alone, with the spec's value for the other
        part."""
        part = AFTER.get(local_name(self.small.site))
        if part is None or not KNOBS[knob].by_part:
            return []
        own = self.residuals.decoder.knob(knob, self.small.layer)
        both = {each: for_queries_or_keys(own, each) for each in QUERY_KEY_PARTS}
        enough = [one for one in tried if one.residual <= MORE_ON_ALL * self.limit]
        return [Fitted(value={**both, part: one.value}, residual=one.residual) for one in enough]

    def _as_other_layers(self) -> Iterator[list[Explanation]]:
        """Yield sets of two and more values that the spec gives to another kind of layer, the smaller sets first: a program that
        takes a layer for one of the other kind has several of them at once."""
        spec, own = self.residuals.decoder, self.small.layer
        if own is None:
            return
        kinds: dict[str, Setting] = {}
        for layer in range(spec.dims["n_layers"]):
            other = {knob: values[layer] for knob, values in spec.values.items() if values[layer] != values[own]}
            read = knobs_asked(self.residuals, self.small) | knobs_asked(self.residuals, self.small, other)
            kind = {knob: value for knob, value in sorted(other.items()) if knob in read}
            if 1 < len(kind) <= OF_A_KIND:
                kinds[repr(kind)] = kind
        for size in range(2, OF_A_KIND + 1):
            sets = (chosen for kind in kinds.values() for chosen in combinations(kind.items(), size))
            yield [with_residual(self.residuals, [self.small], dict(chosen)) for chosen in sets]

    def _by_frequencies(self) -> list[Explanation]:
        """Return the bases and scalings that explain fitted rotary frequencies, and the frequencies themselves as a scaling."""
        if local_name(self.small.site) not in AFTER or THETA not in knobs_asked(self.residuals, self.small):
            return []
        said = {knob: self.residuals.decoder.knob(knob, self.small.layer) for knob in (THETA, SCALING, *LAYOUT)}
        d_head = self.residuals.shape(self.small)[-1]
        layout = Layout(
            d_head=d_head, first=said["rope.first_dim"], pairs=int(said["rope.partial"] or d_head) // 2,
            pairing=said["rope.pairing"],
        )  # fmt: skip
        small, whole = (difference_of(self.residuals, parts, SCALING, {}) for parts in ([self.small], self.parts))
        length, longest = (
            max(int(self.residuals.places(part).max()) + 1 for part in parts) for parts in ([self.small], self.parts)
        )
        found = read_off(layout, small, length, attention_factor(said[SCALING]))
        if found is None:
            return []
        tried = [with_residual(self.residuals, [self.small], setting) for setting in laws(found, said, length)]
        near = sorted(
            (one for one in tried if self._is_near(one)),
            key=lambda one: (freedom_of(one.values, said), sum(digits_of(one.values, said))),
        )
        return [
            *near[: 2 * BEAM],
            with_residual(self.residuals, [self.small], {SCALING: sharpened(layout, whole, found, longest)}),
        ]

    def _beyond_the_small(self) -> Iterator[list[Explanation]]:
        """Add one knob to settings that explain the smallest probe alone, searched in a longer one: a window may show there
        only."""
        alone, found = least(self.on_small_alone, BEAM), []
        self.on_small_alone.clear()
        for one in alone:
            values = values_with_setting(self.residuals, one.values, self.small.layer)
            longer = replace(self, small=_smallest_wrong(self.residuals, self.parts, self.limit, values))
            found += longer._on_all(best_of_each(list(longer._with_one_more(one))))
        yield found

    def _on_all(self, tried: Iterable[Explanation]) -> list[Explanation]:
        """Fit the settings that may explain the smallest probe on all probes; note those that explain the smallest alone."""
        near = [one for one in tried if self._is_near(one)]
        found = [self._polished(one, self.parts) for one in near]
        pairs = zip(near, found, strict=True)
        self.on_small_alone.extend(one for one, on_all in pairs if on_all.residual > self.limit >= one.residual)
        return found

    def _is_near(self, one: Explanation) -> bool:
        """Return whether a setting may explain the component, judged by the smallest probe alone."""
        return explains(self.residuals, [self.small], one, MORE_ON_ALL * self.limit)

    def _polished(self, one: Explanation, parts: Sequence[Component]) -> Explanation:
        """Fit all numbers of a set together, and round each to the fewest digits that leave the same residual."""
        values = dict(one.values)
        spots = spots_of(values)

        def difference(these: Sequence[float]) -> Tensor | None:
            return _difference(self.residuals, parts, with_numbers(values, spots, these))

        if spots:
            start, positive = (
                [number_at(values, spot) for spot in spots],
                [is_positive(spot) for spot in spots],
            )
            at, _ = gauss_newton(difference, start, positive)
            values = with_numbers(values, spots, at)
        for spot in spots:
            own = _at_spot(self.residuals, parts, values, spot)
            number = with_few_digits(own, number_at(values, spot), positive=is_positive(spot)).value
            values = with_number(values, spot, number)
        before, after = (with_residual(self.residuals, parts, setting) for setting in (one.values, values))
        best = after if after.residual <= SAME_WITHIN * before.residual else before
        return self._without_what_is_as_said(self._without_what_is_as_absent(best, parts), parts)

    def _without_what_is_as_absent(self, one: Explanation, parts: Sequence[Component]) -> Explanation:
        """Replace each optional number by None if that leaves the same residual, as it does for a cap of thousands."""
        numbers = [
            str(knob) for knob, *more in spots_of(one.values) if not more or isinstance(one.values[str(knob)], str)
        ]
        for knob in (knob for knob in numbers if KNOBS[knob].optional):
            absent = with_residual(self.residuals, parts, {**one.values, knob: None})
            one = absent if absent.residual <= SAME_WITHIN * one.residual else one
        return one

    def _without_what_is_as_said(self, one: Explanation, parts: Sequence[Component]) -> Explanation:
        """Drop each knob whose spec value does as well beside the others. The search may have needed it: a number that the model
        rounds has no slope, and is found only beside another place of rounding."""
        for knob in one.values if len(one.values) > 1 else ():
            rest = {other: value for other, value in one.values.items() if other != knob}
            as_said = with_residual(self.residuals, parts, rest) if rest else one
            one = as_said if as_said.residual <= SAME_WITHIN * one.residual else one
        return one


def _at_spot(residuals: Residuals, parts: Sequence[Component], values: Setting, spot: Path) -> Difference:
    """Return the differences of all parts as a function of one number of a setting, with the others fixed."""
    return lambda number: _difference(residuals, parts, with_number(dict(values), spot, number))


def _difference(residuals: Residuals, parts: Sequence[Component], setting: Setting) -> Tensor | None:
    return combined_difference(residuals, parts, values_with_setting(residuals, setting, parts[0].layer))
