"""Decide whether two fits of one knob (one per side) differ by more than rounding explains.

Numbers differ if they are more than `SIGMAS` joint standard errors apart *and* apart by more than a share `MATERIAL` of
their size: a smaller shift, as from storing a constant in another dtype, is no fault. Whole numbers without a standard
error differ if they are not equal. Words differ if they are not equal and neither fit lists the other's word as an
equally good explanation (`tied_with`). Other values are compared within a relative tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import KnobFit
from parity_audit.diagnose.thresholds import NEAR, SAME_VALUE
from parity_audit.formulas.activations import canonical

SIGMAS = 6.0
"""Joint standard errors by which two values must be apart to differ. It is this large because a model has hundreds of
constants in tens of layers, and their errors are not exactly normally distributed."""
MATERIAL = 2e-4
"""Smallest difference that counts, as a share of the constant's size. For scale: a constant that is stored in float16
or TF32 instead of float32 moves by 2^-12 (2.4e-4)."""
MATERIAL_OF = {
    "norm.eps": 0.02, "norm.offset": 0.01, "norm.gain": 1e-4,
    "qk_norm.eps": 0.02, "qk_norm.offset": 0.01, "qk_norm.gain": 1e-4,
}  # fmt: skip
"""The same share for constants that are measured less precisely than others (an eps shows only where activations are
small, an offset only beside the weights) or more precisely (gains)."""


@dataclass(frozen=True, kw_only=True)
class FitPair:
    """The same knob at the same place on both sides."""

    candidate: KnobFit
    reference: KnobFit

    @property
    def sigmas(self) -> float:
        """Distance of the two values in joint standard errors; infinite for words and where that error is 0."""
        x, y = measured(self.candidate), measured(self.reference)
        if x is None or y is None:
            return math.inf
        joint = math.hypot(x[1], y[1])
        return abs(x[0] - y[0]) / joint if joint > 0 else math.inf

    @property
    def distance(self) -> tuple[float, float] | None:
        """The pair (candidate - reference, joint standard error), or None for words."""
        x, y = measured(self.candidate), measured(self.reference)
        return None if x is None or y is None else (x[0] - y[0], math.hypot(x[1], y[1]))


def pairs_of(candidate: Iterable[KnobFit], reference: Iterable[KnobFit]) -> list[FitPair]:
    """Pair the fits of both sides by knob and layer.

    A fit is paired with the reference's fit at the same site. If there is none, it is paired with the reference's first
    fit of this knob and layer, provided that a layer has only one value of the knob (see `has_places`).
    """
    by_place: dict[tuple[str, int | None], list[KnobFit]] = {}
    for fit in reference:
        by_place.setdefault((fit.knob, fit.layer), []).append(fit)
    pairs = []
    for fit in candidate:
        others = by_place.get((fit.knob, fit.layer), [])
        elsewhere = None if has_places(fit) else next(iter(others), None)
        match = next((other for other in others if other.site == fit.site), elsewhere)
        if match is not None:
            pairs.append(FitPair(candidate=fit, reference=match))
    return pairs


def has_places(fit: KnobFit) -> bool:
    """Whether a layer has several places for this knob: norms, and the factors of what the sublayers add."""
    return fit.knob.startswith(("norm.", "qk_norm.", "residual.scale"))


def measured(fit: KnobFit) -> tuple[float, float] | None:
    """The pair (value, standard error), or None if the value is not a number or has no standard error."""
    if fit.stderr is None or not is_number(fit.value):
        return None
    return float(fit.value), fit.stderr  # type: ignore[arg-type]


def material(pair: FitPair) -> float:
    """The smallest difference of this pair that counts, in the unit of the knob; 0 unless both values are numbers."""
    x, y = measured(pair.candidate), measured(pair.reference)
    size = max(abs(x[0]), abs(y[0])) if x and y else 0.0
    return MATERIAL_OF.get(pair.candidate.knob, MATERIAL) * size


def differs(pair: FitPair) -> bool:
    """Whether the two values of a pair differ by more than rounding explains."""
    a, b = pair.candidate, pair.reference
    apart = pair.distance
    if apart is not None:
        return pair.sigmas > SIGMAS and abs(apart[0]) > material(pair)
    if tied(a, b.value) or tied(b, a.value):
        return False
    if _is_count(a.value) and _is_count(b.value):
        return a.value != b.value
    return not same(a.value, b.value, MATERIAL if isinstance(a.value, list) else NEAR)


def consistent_with(pair: FitPair, like: Sequence[FitPair]) -> bool:
    """Whether a pair's difference is also consistent with the differences of the pairs in `like`.

    This is asked of pairs that do not differ by themselves: the pair's difference must lie within `SIGMAS` of its own
    joint standard errors of the mean difference of `like`, weighted by 1 / error^2. False if one of the values is not a
    number.
    """
    own, others = pair.distance, [other.distance for other in like]
    if own is None or any(other is None for other in others):
        return False
    # A fit without any residual (for example a value of exactly 0.5) has standard error 0; its weight is made very large instead of
    # infinite.
    least_error = torch.finfo(torch.float32).tiny
    weights = [1 / max(other[1], least_error) ** 2 for other in others if other is not None]
    mean = sum(w * other[0] for w, other in zip(weights, others, strict=True) if other is not None) / sum(weights)
    return abs(own[0] - mean) <= SIGMAS * own[1]


def same_value(a: KnobFit, b: KnobFit) -> bool:
    """Whether two fits of one side, in different layers, have the same value within their errors or within
    `SAME_VALUE`."""
    return not differs(FitPair(candidate=a, reference=b)) or same(a.value, b.value, SAME_VALUE)


def tied(fit: KnobFit, value: KnobValue) -> bool:
    """Whether a fit lists this value among the values that explain its component as well as its own."""
    return canonical(value) in [canonical(other) for other in fit.evidence.get("tied_with", [])]


def same(a: KnobValue, b: KnobValue, tolerance: float | None = None) -> bool:
    """Whether two values are equal: words by their canonical names, numbers within a relative tolerance.

    Dictionaries, lists and tuples are compared entry by entry, with the same tolerance for the numbers in them. The
    default tolerance is `NEAR`.
    """
    tolerance = NEAR if tolerance is None else tolerance
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if is_number(a) and is_number(b):
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=1e-12)  # type: ignore[arg-type]
    if isinstance(a, str) and isinstance(b, str):
        return canonical(a) == canonical(b)
    return a == b


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is an int or a float and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
