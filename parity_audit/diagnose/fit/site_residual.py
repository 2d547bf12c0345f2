"""The residual that knob values leave at a site, over every probe that captures it."""

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
"""How many times the rounding limit a value may leave on the smallest probe and still be fitted on all probes."""
COARSE_RESIDUAL = 0.3
"""The largest residual for which rounding to a narrow dtype is tried in a set of several knobs, or accepted: no
rounding is as large."""

OF_A_BLOCK = "residual.repeated"


def values_with_setting(residuals: Residuals, setting: Setting, layer: int | None) -> Values:
    """Return the spec's knob values with those of a setting in their place, where a component of this layer reads
    them."""
    values = residuals.decoder.values
    for knob, value in setting.items():
        values = with_value(residuals, values, knob, value, layer)
    return values


def knobs_asked(residuals: Residuals, component: Component, setting: Setting | None = None) -> frozenset[str]:
    """Return the knobs that a component's formula asks for under the spec's values, changed by `setting` if that is
    given."""
    return residuals.asked(component, values_with_setting(residuals, setting or {}, component.layer))


def combined_difference(
    residuals: Residuals, parts: Sequence[Component], values: Values | None = None
) -> Tensor | None:
    """Return the differences of several probes as one flat tensor, scaled so that its norm is the root mean square of
    their norms.

    Probes that cannot be computed because a tensor or token is missing under these values (see `Residuals.lacks`) are
    left out. None if any other probe cannot be compared.
    """
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
    """Return the norm of `combined_difference`; infinite if there is no difference to take it of."""
    return norm_of(combined_difference(residuals, parts, values))


def most_left(residuals: Residuals, parts: Sequence[Component], values: Values | None = None) -> float:
    """Return the largest residual of any one probe. An error that shows only in a long or padded probe is diluted in
    the mean of all."""
    return max(residual(residuals, [part], values) for part in parts)


def with_residual(residuals: Residuals, parts: Sequence[Component], setting: Setting) -> Explanation:
    """Return an `Explanation` with this setting and the residual that it leaves over these components."""
    return Explanation(
        values=setting, residual=residual(residuals, parts, values_with_setting(residuals, setting, parts[0].layer))
    )


def explains(residuals: Residuals, parts: Sequence[Component], one: Explanation, limit: float) -> bool:
    """Return whether a setting explains these components: its residual `one.residual` is at most `limit`, which is
    rounding.

    A setting that repeats a block may leave `FEW_ROUNDINGS` times as much, the rounding of a whole block. A setting
    with a number outside the span of its knob explains nothing.

    Rounding to a narrow dtype inside a component is not reproduced to the last bit everywhere: a number near the middle
    of two neighbours may be rounded to either, and the size of a whole token with it. Such a setting therefore also
    explains a component if its residual is at most `COARSE_RESIDUAL` and it passes one of two tests. It is compared
    with the better of the same setting without the rounding and the spec's values. Either at most `MOST_UNEXPLAINED` of
    the numbers that are wrong there are still wrong, or no more numbers are wrong and the residual is lower by at least
    the factor `CLEARLY_MORE`.
    """
    if not all(starmap(_is_in_span, one.values.items())):
        return False
    limit *= FEW_ROUNDINGS if OF_A_BLOCK in one.values else 1.0
    exact = {knob: value for knob, value in one.values.items() if KNOBS[knob].kind != ROUNDING}
    if one.residual <= limit or len(exact) == len(one.values) or one.residual > COARSE_RESIDUAL:
        return one.residual <= limit
    off, *others = (
        combined_difference(residuals, parts, values_with_setting(residuals, values, parts[0].layer))
        for values in (one.values, exact, {})
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
    """Return whether a number lies in the span of its knob (0 always does). An eps of 1e20, for example, makes a
    norm's output zero, which is another cause."""
    row = KNOBS[knob]
    if row.kind != REAL or row.span is None or not is_number(value) or value == 0:
        return True
    return bool(row.span[0] <= value <= row.span[1])


def without_rounding(residuals: Residuals, layer: int | None, held: Setting, known: Collection[str]) -> Setting:
    """Return the setting that switches off every narrow dtype among the knobs that a formula is `known` to ask for.

    It maps each such knob to `full`. The derivative with respect to a number is taken under this setting, because a
    small step in a number that is then rounded changes nothing.
    """
    narrow = [knob for knob in known if KNOBS[knob].kind == ROUNDING]
    values = {knob: held.get(knob, residuals.decoder.knob(knob, layer)) for knob in narrow}
    return {knob: FULL for knob, value in values.items() if value not in (None, FULL)}


def difference_of(residuals: Residuals, parts: Sequence[Component], knob: str, held: Setting) -> Difference:
    """Return the function from a value of one knob to the differences of all parts, with the knobs in `held` fixed
    at their values."""
    layer = parts[0].layer
    return lambda value: combined_difference(
        residuals, parts, values_with_setting(residuals, {**held, knob: value}, layer)
    )
