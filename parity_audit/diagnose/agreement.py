"""Do two fits of one knob agree? The judgement that stands between rounding and an accusation.

Numbers differ when they lie more than `SIGMAS` joint standard errors *and* a share `MATERIAL` of their size apart
(a constant stored in another dtype moves by less and is no fault).
Whole numbers and words differ when they are not the same, words when they are not tied either.
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
"""Two values differ where they are so many joint standard errors apart: a model has hundreds of constants in tens of layers, and
their errors are no exact normal distribution."""
MATERIAL = 2e-4
"""Of its size: the least difference that counts of a constant. One that is kept in float16 or TF32 instead moves by 2^-12."""
MATERIAL_OF = {
    "norm.eps": 0.02, "norm.offset": 0.01, "norm.gain": 1e-4,
    "qk_norm.eps": 0.02, "qk_norm.offset": 0.01, "qk_norm.gain": 1e-4,
}  # fmt: skip
"""The same for constants that are seen less well (an eps where activations are small alone, an offset beside weights), or better."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same knob at the same place on both sides."""

    candidate: KnobFit
    reference: KnobFit

    @property
    def sigmas(self) -> float:
        """The distance in joint standard errors; infinite for words."""
        x, y = measured(self.candidate), measured(self.reference)
        if x is None or y is None:
            return math.inf
        joint = math.hypot(x[1], y[1])
        return abs(x[0] - y[0]) / joint if joint > 0 else math.inf

    @property
    def distance(self) -> tuple[float, float] | None:
        """(candidate - reference, joint standard error), None for words."""
        x, y = measured(self.candidate), measured(self.reference)
        return None if x is None or y is None else (x[0] - y[0], math.hypot(x[1], y[1]))


def pairs_of(candidate: Iterable[KnobFit], reference: Iterable[KnobFit]) -> list[Pair]:
    """Fits of one knob and layer side by side: those of the same site, else of another where the layer has one value of the knob."""
    by_place: dict[tuple[str, int | None], list[KnobFit]] = {}
    for fit in reference:
        by_place.setdefault((fit.knob, fit.layer), []).append(fit)
    pairs = []
    for fit in candidate:
        others = by_place.get((fit.knob, fit.layer), [])
        elsewhere = None if has_places(fit) else next(iter(others), None)
        match = next((other for other in others if other.site == fit.site), elsewhere)
        if match is not None:
            pairs.append(Pair(candidate=fit, reference=match))
    return pairs


def has_places(fit: KnobFit) -> bool:
    """Whether a layer has several places for this knob: norms, and what sublayers add."""
    return fit.knob.startswith(("norm.", "qk_norm.", "residual.scale"))


def measured(fit: KnobFit) -> tuple[float, float] | None:
    """(value, standard error), None for words."""
    if fit.stderr is None or not is_number(fit.value):
        return None
    return float(fit.value), fit.stderr  # type: ignore[arg-type]


def material(pair: Pair) -> float:
    """The smallest difference that counts, in the unit of the comparison."""
    x, y = measured(pair.candidate), measured(pair.reference)
    size = max(abs(x[0]), abs(y[0])) if x and y else 0.0
    return MATERIAL_OF.get(pair.candidate.knob, MATERIAL) * size


def differs(pair: Pair) -> bool:
    """Whether rounding cannot explain the distance."""
    a, b = pair.candidate, pair.reference
    apart = pair.distance
    if apart is not None:
        return pair.sigmas > SIGMAS and abs(apart[0]) > material(pair)
    if tied(a, b.value) or tied(b, a.value):
        return False
    if _is_count(a.value) and _is_count(b.value):
        return a.value != b.value
    return not same(a.value, b.value, MATERIAL if isinstance(a.value, list) else NEAR)


def undecided(pair: Pair, like: Sequence[Pair]) -> bool:
    """Whether a pair that does not differ by itself would admit the values of `like` as well."""
    own, others = pair.distance, [other.distance for other in like]
    if own is None or any(other is None for other in others):
        return False
    # A value that leaves nothing at all, as an exact half does, has no standard error: its weight is very large instead of infinite.
    least_error = torch.finfo(torch.float32).tiny
    weights = [1 / max(other[1], least_error) ** 2 for other in others if other is not None]
    mean = sum(w * other[0] for w, other in zip(weights, others, strict=True) if other is not None) / sum(weights)
    return abs(own[0] - mean) <= SIGMAS * own[1]


def alike(a: KnobFit, b: KnobFit) -> bool:
    """Whether two layers of one side hold the same value."""
    return not differs(Pair(candidate=a, reference=b)) or same(a.value, b.value, SAME_VALUE)


def tied(fit: KnobFit, value: KnobValue) -> bool:
    """Whether a fit admits this word as well as its own."""
    return canonical(value) in [canonical(other) for other in fit.evidence.get("tied_with", [])]


def same(a: KnobValue, b: KnobValue, tolerance: float | None = None) -> bool:
    """Equal words and lists; numbers, also inside dictionaries and lists, within a relative tolerance, by default `NEAR`."""
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
    """A number that is not a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
