"""From fits on both sides to findings: the same knob, different values, beyond every error of measurement.

Two fits differ when their distance exceeds `SIGMAS` joint standard errors *and* a share `MATERIAL` of the value
(a constant stored in another dtype moves by less and is no fault), or when their intervals are disjoint,
or when their words are not the same and not tied. One finding per knob and pair of values, with its layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity_audit.core.report import Finding
from parity_audit.core.types import KnobValue
from parity_audit.diagnose.evidence import KnobFit, KnobSpec, spec_value
from parity_audit.diagnose.identify.activation import canonical
from parity_audit.diagnose.identify.attention_rows import grouped

SIGMAS = 8.0
MATERIAL = 2e-4
MATERIAL_OF = {"norm.eps": 0.02, "norm.offset": 0.01}
NEARER = 0.25
SAME_IN_DICT = 0.01
MASKS = ("attention.window", "attention.mask")
DEFAULTS: dict[str, KnobValue] = {
    "attention.mask": "causal", "mlp.gate_up": "gate activated", "logits.centring": "none", "logits.scale": 1.0,
    "norm.kind": "rms", "rope.offset": 0.0, "embed.scale": 1.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same knob at the same site on both sides, and how many joint standard errors lie between them."""

    candidate: KnobFit
    reference: KnobFit
    sigmas: float


def merge(
    candidate_fits: Sequence[KnobFit], reference_fits: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]
) -> list[Finding]:
    """Findings where both sides were fitted and differ; knobs in order of their names."""
    pairs = [pair for pair in _pairs(candidate_fits, reference_fits) if differs(pair)]
    fitted: dict[str, set[int | None]] = {}
    for fit in candidate_fits:
        fitted.setdefault(fit.knob, set()).add(fit.layer)
    findings: list[Finding] = []
    for knob in sorted({pair.candidate.knob for pair in pairs}):
        own = [pair for pair in pairs if pair.candidate.knob == knob]
        groups = [own] if knob == "attention.window" else _grouped(own)
        findings += [_finding(group, knobs, fitted[knob]) for group in groups]
    return findings


def _pairs(candidate: Iterable[KnobFit], reference: Iterable[KnobFit]) -> list[Pair]:
    """Fits of one knob and layer, several norms of a layer matched by site; sites may differ where one is hidden."""
    pairs = []
    by_place: dict[tuple[str, int | None], list[KnobFit]] = {}
    for fit in reference:
        by_place.setdefault((fit.knob, fit.layer), []).append(fit)
    for fit in candidate:
        others = by_place.get((fit.knob, fit.layer), [])
        norm = fit.knob.startswith("norm.")
        match = next((other for other in others if not norm or other.site == fit.site), None)
        if match is not None:
            pairs.append(Pair(candidate=fit, reference=match, sigmas=_sigmas(fit, match)))
    return pairs


def _sigmas(a: KnobFit, b: KnobFit) -> float:
    x, y = _measured(a), _measured(b)
    if x is None or y is None:
        return math.inf
    joint = math.hypot(x[1], y[1])
    return abs(x[0] - y[0]) / joint if joint > 0 else math.inf


def _measured(fit: KnobFit) -> tuple[float, float] | None:
    """(value, standard error) in the parametrisation for comparison, None for words."""
    if fit.coordinate is not None:
        return fit.coordinate
    number = isinstance(fit.value, (int, float)) and not isinstance(fit.value, bool)
    return (float(fit.value), fit.stderr) if number and fit.stderr is not None else None  # type: ignore[arg-type]


def differs(pair: Pair) -> bool:
    """Whether rounding cannot explain the distance; see the module docstring."""
    a, b = pair.candidate, pair.reference
    if a.interval is not None and b.interval is not None:
        return a.interval[0] > b.interval[1] or b.interval[0] > a.interval[1]
    x, y = _measured(a), _measured(b)
    if x is not None and y is not None:
        if a.coordinate is not None and a.value is None and b.value is None:
            return False
        material = MATERIAL_OF.get(a.knob, MATERIAL) * max(abs(x[0]), abs(y[0]))
        return pair.sigmas > SIGMAS and abs(x[0] - y[0]) > material
    if _tied(a, b.value) or _tied(b, a.value):
        return False
    return not same(a.value, b.value)


def _tied(fit: KnobFit, value: KnobValue) -> bool:
    return canonical(value) in [canonical(other) for other in fit.evidence.get("tied_with", [])]


def same(a: KnobValue, b: KnobValue, tolerance: float = SAME_IN_DICT) -> bool:
    """Equal words and lists; numbers, also inside dictionaries and lists, within a relative tolerance."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if _is_number(a) and _is_number(b):
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=1e-12)  # type: ignore[arg-type]
    if isinstance(a, str) and isinstance(b, str):
        return canonical(a) == canonical(b)
    return a == b


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _grouped(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs with the same two values together, in order of layers."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        for group in groups:
            first = group[0]
            if _alike(first.candidate, pair.candidate) and _alike(first.reference, pair.reference):
                group.append(pair)
                break
        else:
            groups.append([pair])
    return groups


def _alike(a: KnobFit, b: KnobFit) -> bool:
    return not differs(Pair(candidate=a, reference=b, sigmas=_sigmas(a, b))) or same(a.value, b.value, 1e-4)


def _finding(group: Sequence[Pair], knobs: Mapping[str, KnobSpec], fitted: set[int | None]) -> Finding:
    first = group[0]
    knob = first.candidate.knob
    layers = sorted({pair.candidate.layer for pair in group if pair.candidate.layer is not None})
    everywhere = set(layers) == fitted and (len(layers) > 1 or not layers)
    candidate, reference = _pooled([p.candidate for p in group]), _pooled([p.reference for p in group])
    spec = _spec(knob, first.candidate.layer, knobs, first.candidate.value)
    if knob == "attention.window" and len({(p.candidate.value, p.reference.value) for p in group}) > 1:  # type: ignore[arg-type]
        candidate, reference = _pattern([p.candidate for p in group]), _pattern([p.reference for p in group])
    departs = departure([p.candidate for p in group], [p.reference for p in group], knobs)
    return Finding(
        knob=knob, kind=_kind(knob, candidate, reference), layers=None if everywhere else tuple(layers) or None,
        site=_full_site(first.candidate), reference_value=reference, candidate_value=candidate, spec_value=spec,
        evidence=_evidence(group), confidence=confidence(group), departs_from_spec=departs,
        message=f"{knob} is {shown(candidate)} in the candidate and {shown(reference)} in the reference",
    )  # fmt: skip


def _full_site(fit: KnobFit) -> str:
    return fit.site if fit.layer is None else f"blocks.{fit.layer}.{fit.site}"


def _pooled(fits: Sequence[KnobFit]) -> KnobValue:
    """The mean of numeric values weighted by 1/stderr^2; the first of anything else."""
    numbers = [(float(fit.value), fit.stderr) for fit in fits if _is_number(fit.value) and fit.stderr]  # type: ignore[arg-type]
    if len(numbers) != len(fits):
        return fits[0].value
    weights = [1 / stderr**2 for _, stderr in numbers if stderr]
    return sum(value * weight for (value, _), weight in zip(numbers, weights, strict=True)) / sum(weights)


def _pattern(fits: Sequence[KnobFit]) -> dict[str, Any]:
    """A window that is not the same in all these layers: sizes, and where."""
    sizes = {str(fit.layer): fit.value for fit in fits}
    return {"by_layer": sizes}


def _spec(knob: str, layer: int | None, knobs: Mapping[str, KnobSpec], like: KnobValue) -> KnobValue:
    """The spec's value in the form of the fit; a usual value where the spec is silent."""
    value = spec_value(knobs, knob, layer) if knob in knobs else DEFAULTS.get(knob)
    if knob == "n_kv_heads" and isinstance(value, int) and isinstance(like, list):
        return list(grouped(len(like), value))
    return value


def departure(
    candidate: Sequence[KnobFit], reference: Sequence[KnobFit], knobs: Mapping[str, KnobSpec]
) -> str:
    """Which side's fitted values are not the spec's: "candidate", "reference", "both", or "unknown"."""
    if candidate[0].knob not in knobs and candidate[0].knob not in DEFAULTS:
        return "unknown"
    def departs(fits: Sequence[KnobFit], others: Sequence[KnobFit]) -> bool:
        return not all(_agrees(fit, other, knobs) for fit, other in zip(fits, others, strict=True))

    sides = ["candidate"] * departs(candidate, reference) + ["reference"] * departs(reference, candidate)
    return {0: "unknown", 1: sides[0] if sides else "", 2: "both"}[len(sides)]


def _agrees(fit: KnobFit, other: KnobFit, knobs: Mapping[str, KnobSpec]) -> bool:
    """Whether a fit is the spec's value: within its error, or much nearer to it than the two sides to each other."""
    spec = _spec(fit.knob, fit.layer, knobs, fit.value)
    if fit.interval is not None:
        size = math.inf if spec is None else float(spec)  # type: ignore[arg-type]
        return fit.interval[0] <= size <= fit.interval[1]
    if _is_number(spec) and _is_number(fit.value):
        apart = abs(float(fit.value) - float(other.value)) if _is_number(other.value) else 0.0  # type: ignore[arg-type]
        material = MATERIAL_OF.get(fit.knob, MATERIAL) * abs(float(spec))  # type: ignore[arg-type]
        slack = max(material, SIGMAS * (fit.stderr or 0.0), NEARER * apart)
        return abs(float(fit.value) - float(spec)) <= slack  # type: ignore[arg-type]
    return same(fit.value, spec) or _tied(fit, spec)


def _kind(knob: str, candidate: KnobValue, reference: KnobValue) -> str:
    if knob in MASKS:
        return "mask"
    if knob == "rope.offset":
        return "settings"
    number = all(value is None or _is_number(value) for value in (candidate, reference))
    return "constant" if number else "variant"


def confidence(group: Sequence[Pair]) -> float:
    """0.99 for a clean and wide separation; less for ties, few sigmas, or a fit that leaves much unexplained."""
    worst = max(group, key=lambda pair: pair.candidate.residual)
    floor = max(worst.reference.residual, 1e-7)
    value = 0.99
    if worst.candidate.residual > 30 * floor and worst.candidate.residual > 1e-4:
        value *= 0.8
    if worst.candidate.residual > 0.02:
        value *= 0.8
    if min(pair.sigmas for pair in group) < 2 * SIGMAS:
        value *= 0.85
    if any(fit.evidence.get("tied_with") for pair in group for fit in (pair.candidate, pair.reference)):
        value *= 0.6
    return round(value, 3)


def _evidence(group: Sequence[Pair]) -> dict[str, Any]:
    """The numbers a sceptic would ask for, of both sides, in each layer."""
    ties = sorted({str(name) for p in group for f in (p.candidate, p.reference) for name in f.evidence.get("tied_with", [])})
    out: dict[str, Any] = {
        "sigmas": None if math.isinf(least := min(pair.sigmas for pair in group)) else least,
        "candidate": [_facts(pair.candidate) for pair in group],
        "reference": [_facts(pair.reference) for pair in group],
    }
    return out | ({"tied_with": ties} if ties else {})


def _facts(fit: KnobFit) -> dict[str, Any]:
    bounds = None if fit.interval is None else [None if math.isinf(end) else end for end in fit.interval]
    facts = {"layer": fit.layer, "value": fit.value, "stderr": fit.stderr, "unexplained": fit.residual, "n": fit.n,
             "read_from": fit.site, **({"interval": bounds} if bounds else {})}  # fmt: skip
    return facts | {key: value for key, value in fit.evidence.items() if not (isinstance(value, float) and math.isinf(value))}


def shown(value: KnobValue) -> str:
    """A value for a sentence; six digits are for the eye, the finding keeps all."""
    if value is None:
        return "off"
    return f"{value:.6g}" if _is_number(value) else str(value)
