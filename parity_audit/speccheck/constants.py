"""Checks each constant of a spec against the judge: if the spec's values do not reproduce a component, finds the values that do.

Components are computed one at a time from the judge's own inputs, so an error is found in the component that makes it. If the
formula with the spec's values has a residual above rounding, each knob that the formula asks for is searched alone. Of the knobs
that explain the component alone, the first whose value does not make the layer's other components worse is taken, else the first of
all. If no knob alone explains it, sets of knobs are searched as in an audit (see `diagnose.fit.explain`). The spec's constants for
the knobs found are contradicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parity_audit.diagnose.fit.explain import explanations, said_of
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values, changed, largest, value_under
from parity_audit.diagnose.fit.search import FLOAT64_RESIDUAL, fitted
from parity_audit.diagnose.fit.settings import (
    FITTED_PER_PART,
    MOST_DIGITS,
    Explanation,
    digits_of,
    freedom_rank,
    words_of,
)
from parity_audit.diagnose.fit.site_residual import MORE_ON_ALL, difference_of, values_with_setting
from parity_audit.formulas.knobs import KNOBS, default

BY_LENGTH = ("attention.window", "attention.chunk", "rope.scaling", "rope.theta")
"""The knobs that a long text shows and a short one may not. On a long text they are searched first, because a short text shows all
other knobs as well."""
UNEXPLAINED = ""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A constant of the spec that the reference contradicts.

    - `knob`: its knob; empty if no knob explains the component.
    - `layers`: the layers concerned; empty outside the blocks.
    - `site`: the component that shows the contradiction.
    - `said`: the spec's value. `fitted`: the value that reproduces the component.
    - `left`: the residual with the fitted value, or with the spec's value if no knob explains the component.
    """

    knob: str
    layers: tuple[int, ...]
    site: str
    said: Any
    fitted: Any
    left: float

    def __str__(self) -> str:
        where = f"layer {', '.join(map(str, self.layers))}" if self.layers else "outside the blocks"
        if not self.knob:
            return f"{self.site}: no knob explains what the formulas leave ({self.left:.2g})"
        return f"{self.knob} ({where}): the spec says {shown(self.said)}, {self.site} of the reference shows {shown(self.fitted)}"


def shown(value: Any) -> str:
    """Return a value as it is written in a message."""
    return f"{value:.10g}" if isinstance(value, float) else "none" if value is None else str(value)


def contradictions(
    residuals: Residuals, components: Sequence[Component], values: Values, *, of: Sequence[Component] | None = None
) -> list[Contradiction]:
    """Return the contradicted constants, in the order in which data flow.

    A value that was found replaces the spec's value for the components that follow.

    Args:
        components: all captured components.
        values: the spec's knob values.
        of: the components to check, up to the first one that contradicts a constant; None to check all components.
    """
    found: list[Contradiction] = []
    for component in components if of is None else of:
        left = residuals.residual(component, values)
        if left <= FLOAT64_RESIDUAL:
            continue
        for one in _explained(residuals, component, values, left, components):
            if one.knob != UNEXPLAINED:
                values = _corrected(residuals, values, one, component)
            found = _joined(found, one)
        if of is not None:
            break
    return found


def _explained(
    residuals: Residuals, component: Component, values: Values, left: float, components: Sequence[Component]
) -> list[Contradiction]:
    """Return the contradiction by the one knob that explains this component, or those by a smallest set of knobs that does.

    If no set of knobs explains it, the result is one contradiction without a knob.
    """
    said = replace(residuals, decoder=replace(residuals.decoder, values=values))
    beside = [other for other in components if other.layer == component.layer and other != component]
    held: Explanation | None = None
    for one in _alone(said, component):
        if _holds(said, one, beside):
            held = one
            break
        held = held or one
    if held is None:
        held = next(iter(explanations(said, [component], FLOAT64_RESIDUAL, FLOAT64_RESIDUAL)), None)
    layers = () if component.layer is None else (component.layer,)
    if held is None:
        return [Contradiction(knob=UNEXPLAINED, layers=layers, site=component.site, said=None, fitted=None, left=left)]
    return [
        Contradiction(
            knob=knob,
            layers=layers,
            site=component.site,
            said=said.decoder.knob(knob, component.layer),
            fitted=value,
            left=held.residual,
        )
        for knob, value in held.values.items()
    ]


def _alone(residuals: Residuals, component: Component) -> Iterator[Explanation]:
    """Yield the values of single knobs that explain a component, in the order in which the knobs are searched.

    Values that the config of a released model would not contain, which are numbers of many digits and choices with a number in them,
    come last, those with the least freedom first.
    """
    unusual = []
    for name in _order(component):
        found = _searched(residuals, component, name)
        if found is None:
            continue
        digits = digits_of(found.values, said_of(found.values, residuals.decoder, component.layer))
        if words_of(name, found.values[name]) or max(digits, default=0) >= MOST_DIGITS:
            unusual.append(found)
        else:
            yield found
    yield from sorted(unusual, key=lambda one: sum(freedom_rank(*item) for item in one.values.items()))


def _holds(residuals: Residuals, one: Explanation, beside: Sequence[Component]) -> bool:
    """Whether an explanation does not make the other components of the layer that ask for its knobs worse than the spec's values do.

    A residual counts as worse if it is above rounding and above `MORE_ON_ALL` times the residual with the spec's values.
    """
    return all(
        residuals.residual(other, values_with_setting(residuals, one.values, other.layer))
        <= max(MORE_ON_ALL * residuals.residual(other, residuals.decoder.values), FLOAT64_RESIDUAL)
        for other in beside
        if not other.knobs.isdisjoint(one.values)
    )


def _order(component: Component) -> list[str]:
    """Return the component's knobs in the order of the search: knobs with few values come first.

    If a choice explains a component, no free number is needed. On a long text, the knobs in `BY_LENGTH` come before all others.
    """
    known = [KNOBS[name] for name in component.knobs]
    cost = {"flag": 0, "choice": 0, "count": 1, "real": 2, "structure": 3, "rounding": 4}
    short = component.probe.sites == "all"
    return [
        row.name
        for row in sorted(known, key=lambda row: (not short and row.name not in BY_LENGTH, cost[row.kind], row.name))
    ]


def _searched(residuals: Residuals, component: Component, name: str) -> Explanation | None:
    """Return the value of one knob with which the component's residual is rounding only, or None if there is none."""
    start, difference = residuals.decoder.knob(name, component.layer), difference_of(residuals, [component], name, {})
    found = fitted(KNOBS[name], difference, start, largest(residuals, component, name))
    if found.residual > FLOAT64_RESIDUAL or freedom_rank(name, found.value) == FITTED_PER_PART:
        return None  # A value that is read off the component itself would explain any error.
    return Explanation(values={name: found.value}, residual=found.residual)


def _corrected(residuals: Residuals, values: Values, one: Contradiction, component: Component) -> Values:
    """Return the values with the contradicted one replaced by the fitted one.

    It is replaced in the component's own layer; for a component outside the blocks, in all layers with the contradicted value.
    """
    count = residuals.decoder.dims["n_layers"]
    own = [layer for layer in range(count) if value_under(residuals, values, one.knob, layer) == one.said]
    return changed(
        values, one.knob, one.fitted, own if component.layer is None else [component.layer], count, default(one.knob)
    )


def _joined(found: list[Contradiction], one: Contradiction) -> list[Contradiction]:
    """Return the list with one more contradiction; one that differs from an earlier one by its layer only is merged into it."""
    for place, other in enumerate(found):
        if one.knob and other.knob == one.knob and other.said == one.said and same(other.fitted, one.fitted):
            layers = tuple(sorted({*other.layers, *one.layers}))
            return [*found[:place], Contradiction(**{**vars(other), "layers": layers}), *found[place + 1 :]]
    return [*found, one]


def same(a: Any, b: Any) -> bool:
    """Whether two fitted values are equal up to the error of a fit (1e-6, relative)."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return bool(a == b)
