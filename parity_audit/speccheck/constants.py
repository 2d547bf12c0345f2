"""Each constant of a spec against the judge: a component that the spec's value does not reproduce names what would.

Components are taken one at a time, from the judge's own inputs, so an error is found where it is made. Where a formula with the
spec's values leaves more than rounding, each knob that the formula asks for is searched alone, and where none leaves rounding the
component is explained as in an audit (see `diagnose.fit.explain`): the knobs that do are contradicted, with these values. Of knobs
that explain it alone, the first that leaves the layer's other components as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parity_audit.diagnose.fit.explain import explanations, said_of
from parity_audit.diagnose.fit.left import MORE_ON_ALL, difference_of, under
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values, changed, largest, value_under
from parity_audit.diagnose.fit.search import ROUNDING, fitted
from parity_audit.diagnose.fit.settings import MOST_DIGITS, READ_OFF, Explanation, digits_of, freedom, words_of
from parity_audit.formulas.knobs import KNOBS, default

BY_LENGTH = ("attention.window", "attention.chunk", "rope.scaling", "rope.theta")
"""The knobs that a long text shows and a short one may not; searched first there, for every other is seen on both."""
UNEXPLAINED = ""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A constant that the reference does not have; `knob` is empty where no knob explains the component."""

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
    """A value in a message."""
    return f"{value:.10g}" if isinstance(value, float) else "none" if value is None else str(value)


def contradictions(
    residuals: Residuals, components: Sequence[Component], values: Values, *, of: Sequence[Component] | None = None
) -> list[Contradiction]:
    """What the reference contradicts, in the order in which data flow; a value that is found holds for what follows.

    Args:
        components: everything that was captured.
        of: the components among them of which the first that contradicts is asked for; None for what all contradict.
    """
    found: list[Contradiction] = []
    for component in components if of is None else of:
        left = residuals.residual(component, values)
        if left <= ROUNDING:
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
    """The knob that leaves rounding of this component alone, else as few as do together; one without a name where none do."""
    said = replace(residuals, decoder=replace(residuals.decoder, values=values))
    beside = [other for other in components if other.layer == component.layer and other != component]
    held: Explanation | None = None
    for one in _alone(said, component):
        if _holds(said, one, beside):
            held = one
            break
        held = held or one
    if held is None:
        held = next(iter(explanations(said, [component], ROUNDING, ROUNDING)), None)
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
    """The knobs that explain a component alone, in the order in which they are searched; last, and by their freedom, what the config
    of a released model would not say: numbers of many digits, and choices with a number in them."""
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
    yield from sorted(unusual, key=lambda one: sum(freedom(*item) for item in one.values.items()))


def _holds(residuals: Residuals, one: Explanation, beside: Sequence[Component]) -> bool:
    """Whether a value leaves no more of the components beside it that ask for its knob than the spec's values do."""
    return all(
        residuals.residual(other, under(residuals, one.values, other.layer))
        <= max(MORE_ON_ALL * residuals.residual(other, residuals.decoder.values), ROUNDING)
        for other in beside
        if not other.knobs.isdisjoint(one.values)
    )


def _order(component: Component) -> list[str]:
    """Knobs with few values first: what a choice explains needs no free number."""
    known = [KNOBS[name] for name in component.knobs]
    cost = {"flag": 0, "choice": 0, "count": 1, "real": 2, "structure": 3, "rounding": 4}
    short = component.probe.sites == "all"
    return [
        row.name
        for row in sorted(known, key=lambda row: (not short and row.name not in BY_LENGTH, cost[row.kind], row.name))
    ]


def _searched(residuals: Residuals, component: Component, name: str) -> Explanation | None:
    """The value of one knob that leaves rounding, None where none does."""
    start, difference = residuals.decoder.knob(name, component.layer), difference_of(residuals, [component], name, {})
    found = fitted(KNOBS[name], difference, start, largest(residuals, component, name))
    if found.left > ROUNDING or freedom(name, found.value) == READ_OFF:
        return None  # what is read off the component itself would explain anything
    return Explanation(values={name: found.value}, residual=found.left)


def _corrected(residuals: Residuals, values: Values, one: Contradiction, component: Component) -> Values:
    """The values with the fitted one: in every layer that the spec gives the contradicted one, if it holds there."""
    count = residuals.decoder.dims["n_layers"]
    own = [layer for layer in range(count) if value_under(residuals, values, one.knob, layer) == one.said]
    return changed(
        values, one.knob, one.fitted, own if component.layer is None else [component.layer], count, default(one.knob)
    )


def _joined(found: list[Contradiction], one: Contradiction) -> list[Contradiction]:
    """The list with one more; the same of another layer is one contradiction."""
    for place, other in enumerate(found):
        if one.knob and other.knob == one.knob and other.said == one.said and same(other.fitted, one.fitted):
            layers = tuple(sorted({*other.layers, *one.layers}))
            return [*found[:place], Contradiction(**{**vars(other), "layers": layers}), *found[place + 1 :]]
    return [*found, one]


def same(a: Any, b: Any) -> bool:
    """Whether two fitted values are one up to the error of a fit."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
    return bool(a == b)
