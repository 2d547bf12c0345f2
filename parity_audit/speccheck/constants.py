"""Each constant of a spec against the judge: a component that the spec's value does not reproduce names what would.

Components are taken one at a time, from the judge's own inputs, so an error is found where it is made. Where a formula with the
spec's values leaves more than rounding, each knob that the formula asks for is searched alone, and the one that leaves
rounding is contradicted, with its value. Where none does, what the fits of an audit read off the component is (see `read`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from parity_audit.diagnose.fit.residuals import Component, Residuals, Values, changed, largest, value_under, with_value
from parity_audit.diagnose.fit.search import ROUNDING, Fitted, fitted
from parity_audit.formulas.knobs import KNOBS, default
from parity_audit.speccheck.read import read_off

BY_LENGTH = ("attention.window", "rope.scaling", "rope.theta")
"""The knobs that a long text shows and a short one may not; searched first there, for every other is seen on both."""
UNEXPLAINED = ""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A constant that the reference does not have; `knob` is empty where no single knob explains the component."""

    knob: str
    layers: tuple[int, ...]
    site: str
    said: Any
    fitted: Any
    left: float

    def __str__(self) -> str:
        where = f"layer {', '.join(map(str, self.layers))}" if self.layers else "outside the blocks"
        if not self.knob:
            return f"{self.site}: no single knob explains what the formulas leave ({self.left:.2g})"
        return f"{self.knob} ({where}): the spec says {shown(self.said)}, {self.site} of the reference shows {shown(self.fitted)}"


def shown(value: Any) -> str:
    """A value in a message."""
    return f"{value:.10g}" if isinstance(value, float) else "none" if value is None else str(value)


def contradictions(
    residuals: Residuals, components: Iterable[Component], values: Values, first_only: bool = False
) -> list[Contradiction]:
    """What the reference contradicts, in the order in which data flow; a value that is found holds for what follows.

    Args:
        first_only: stop at the first.
    """
    found: list[Contradiction] = []
    for component in components:
        left = residuals.residual(component, values)
        if left <= ROUNDING:
            continue
        one = _explained(residuals, component, values, left)
        if one.knob in KNOBS and KNOBS[one.knob].formula:
            values = _corrected(residuals, values, one, component)
        found = _joined(found, one)
        if first_only:
            break
    return found


def _explained(residuals: Residuals, component: Component, values: Values, left: float) -> Contradiction:
    """The knob that leaves rounding of this component, alone."""
    best: tuple[str, Fitted] = (UNEXPLAINED, Fitted(value=None, left=left))
    for name in _order(component):
        tried = _searched(residuals, component, values, name)
        if tried.left < best[1].left and tried.left <= ROUNDING:
            best = name, tried
            break
    layer = component.layer
    if not best[0]:
        return _read(residuals, component, values, left)
    return Contradiction(
        knob=best[0], layers=() if layer is None else (layer,), site=component.site,
        said=value_under(residuals, values, best[0], layer), fitted=best[1].value, left=best[1].left,
    )  # fmt: skip


def _read(residuals: Residuals, component: Component, values: Values, left: float) -> Contradiction:
    """What is read off a component instead, where no single knob's search leads to rounding (a scaling of another kind)."""
    fit, layers = read_off(residuals, component, values), () if component.layer is None else (component.layer,)
    if fit is None:
        return Contradiction(knob=UNEXPLAINED, layers=layers, site=component.site, said=None, fitted=None, left=left)
    before = value_under(residuals, values, fit.knob, component.layer) if fit.knob in KNOBS else None
    return Contradiction(
        knob=fit.knob, layers=layers, site=component.site, said=before, fitted=fit.value, left=fit.residual
    )  # fmt: skip


def _order(component: Component) -> list[str]:
    """Knobs with few values first: what a choice explains needs no free number."""
    known = [KNOBS[name] for name in component.knobs]
    cost = {"flag": 0, "choice": 0, "count": 1, "real": 2, "structure": 3, "rounding": 4}
    short = component.probe.sites == "all"
    return [
        row.name
        for row in sorted(known, key=lambda row: (not short and row.name not in BY_LENGTH, cost[row.kind], row.name))
    ]


def _searched(residuals: Residuals, component: Component, values: Values, name: str) -> Fitted:
    start = value_under(residuals, values, name, component.layer)

    def difference(value: Any) -> torch.Tensor | None:
        return residuals.difference(component, with_value(residuals, values, name, value, component.layer))

    return fitted(KNOBS[name], difference, start, largest(residuals, component, name))


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
