"""What values of knobs leave of a site, in every probe that shows it together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from parity_audit.diagnose.agreement import is_number
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values, with_value
from parity_audit.diagnose.fit.search import Difference, norm_of
from parity_audit.diagnose.fit.settings import Explanation, Setting
from parity_audit.diagnose.thresholds import CLEARLY_MORE, FEW_ROUNDINGS, MOST_UNEXPLAINED
from parity_audit.formulas.choices import FULL
from parity_audit.formulas.knob import REAL, ROUNDING
from parity_audit.formulas.knobs import KNOBS

MORE_ON_ALL = 10.0
"""What a value that was found on the smallest probe may leave there, over what rounding may leave: it is polished on all."""
COARSE_RESIDUAL = 0.3
"""What values have to leave at most for a narrow dtype to be tried beside them, and with it: no rounding is as large."""

OF_A_BLOCK = "residual.repeated"


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
    """The differences of several probes in one, so that its norm is their root mean square; None where one cannot be. Probes that
    say nothing of these values, see `Residuals.lacks`, are left out."""
    values = residuals.decoder.values if values is None else values
    made = [residuals.difference(part, values) for part in parts]
    if len(made) == 1 or all(one is None for one in made):
        return made[0]
    if any(one is None for one in made):
        silent = [one is None and residuals.lacks(part, values) for part, one in zip(parts, made, strict=True)]
        made = [one for one, says_nothing in zip(made, silent, strict=True) if not says_nothing]
        if any(one is None for one in made):
            return None
    every: Tensor = torch.cat([one.flatten() for one in made if one is not None])
    scaled: Tensor = every / len(made) ** 0.5
    return scaled


def residual(residuals: Residuals, parts: Sequence[Component], values: Values | None = None) -> float:
    """The norm of `joined`, infinite where there is none."""
    return norm_of(joined(residuals, parts, values))


def most_left(residuals: Residuals, parts: Sequence[Component], values: Values | None = None) -> float:
    """What values leave of the probe of which they leave most: one that is long or padded shows what several others do not."""
    return max(residual(residuals, [part], values) for part in parts)


def left_by(residuals: Residuals, parts: Sequence[Component], setting: Setting) -> Explanation:
    """A setting, and what it leaves of these components."""
    return Explanation(values=setting, residual=residual(residuals, parts, under(residuals, setting, parts[0].layer)))


def explains(residuals: Residuals, parts: Sequence[Component], one: Explanation, limit: float) -> bool:
    """Whether values explain these components, of which they leave `one.residual`: no more than rounding, which is `limit`,
    or that of a whole block. Numbers that their knobs cannot have explain nothing.

    A narrow dtype inside a component is not computed again to the last bit everywhere, since a number near the middle of two falls
    to either side, and a token's size with it. It explains a component where, beside the same setting without it and beside the
    spec's values, it reproduces nearly all numbers that are wrong, or leaves clearly less and no more numbers wrong.
    """
    if not all(starmap(_is_in_span, one.values.items())):
        return False
    limit *= FEW_ROUNDINGS if OF_A_BLOCK in one.values else 1.0
    exact = {knob: value for knob, value in one.values.items() if KNOBS[knob].kind != ROUNDING}
    if one.residual <= limit or len(exact) == len(one.values) or one.residual > COARSE_RESIDUAL:
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
    return wrong <= MOST_UNEXPLAINED * before or (
        wrong <= before and one.residual * CLEARLY_MORE <= float(without.norm())
    )


def _is_in_span(knob: str, value: Any) -> bool:
    """Whether a number is one that a knob can have: an eps of 1e20 makes a norm's output nothing, which is another cause."""
    row = KNOBS[knob]
    if row.kind != REAL or row.span is None or not is_number(value) or value == 0:
        return True
    return bool(row.span[0] <= value <= row.span[1])


def without_rounding(residuals: Residuals, layer: int | None, held: Setting, known: Collection[str]) -> Setting:
    """`full` for each narrow dtype, under a setting, among the knobs that a formula is `known` to ask for: of a number that is
    rounded, a small step changes nothing."""
    narrow = [knob for knob in known if KNOBS[knob].kind == ROUNDING]
    values = {knob: held.get(knob, residuals.decoder.knob(knob, layer)) for knob in narrow}
    return {knob: FULL for knob, value in values.items() if value not in (None, FULL)}


def difference_of(residuals: Residuals, parts: Sequence[Component], knob: str, held: Setting) -> Difference:
    """The differences of all parts for a value of one knob, while others are held."""
    layer = parts[0].layer
    return lambda value: joined(residuals, parts, under(residuals, {**held, knob: value}, layer))
