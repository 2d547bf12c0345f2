"""Charts of an audit over the layers: noise ratios as shipped, introduced and patched, and fitted constants of both sides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, TypeGuard

from parity_audit.core.limits import PARITY_RATIO
from parity_audit.core.report import Candidate, Finding, SiteDelta
from parity_audit.report.numbers import shown
from parity_audit.report.pictures.axes import Axis, chart, plane

Points = Sequence[tuple[float, float]]
LEAST_SHOWN = 0.05
"""Half the height of a chart of fitted constants, as a share of the value."""
SIDES = {"reference": "reference", "observed": "candidate"}
"""The mark of each side of a fit, and the name of its evidence."""


def noise_by_layer(candidate: Candidate) -> str:
    """The residual stream after each block as shipped and patched, and the most that one of its components introduces."""
    series: dict[str, Points] = {
        "observed": _after_blocks(candidate.sites),
        "introduced": _introduced(candidate.sites),
        "patched": _after_blocks(candidate.patched.sites) if candidate.patched else (),
    }
    values = [value for points in series.values() for _, value in points if value > 0.0]
    if not values or not series["observed"]:
        return ""
    layers = [layer for layer, _ in series["observed"]]
    x, y = plane(_padded(layers), [*values, 0.5, 2 * PARITY_RATIO], y_log=True)
    lines = [_level(x, y, 1.0, "floor", "floor 1"), _level(x, y, PARITY_RATIO, "limit", f"limit {PARITY_RATIO:g}")]
    drawn = [part for kind, points in series.items() for part in _series(kind, points, x, y)]
    return chart("Noise ratio by layer", x, y, "layer", "multiple of the noise floor", [*lines, *drawn])


def fitted_by_layer(finding: Finding) -> str:
    """A constant as it was read off the activations of each layer, with its standard error, and the spec's value as a line."""
    series = {
        "reference": _fitted(finding.evidence.get("reference")),
        "observed": _fitted(finding.evidence.get("candidate")),
    }
    if finding.kind != "constant" or not series["observed"]:
        return ""
    points = [point for own in series.values() for point in own]
    wanted = [float(finding.spec_value)] if _is_number(finding.spec_value) else []
    x, y = plane(_padded([layer for layer, _ in points]), [*(value for _, value in points), *wanted])
    y = _wider(y)
    lines = [_level(x, y, value, "limit", f"spec {shown(value)}") for value in wanted]
    drawn = [part for kind, own in series.items() for part in _series(kind, own, x, y)]
    return chart(f"{finding.knob}, fitted", x, y, "layer", "value", [*lines, *drawn])


def rope_spectrum(finding: Finding) -> str:
    """The angle per position of every pair of a head, as fitted in the first layer that shows it, on both sides."""
    series: dict[str, Points] = {}
    for kind, side in SIDES.items():
        entries = _entries(finding.evidence.get(side))
        found = next((entry["inv_freq"] for entry in entries if entry.get("inv_freq")), ())
        series[kind] = [(float(pair), float(value)) for pair, value in enumerate(found) if value > 0.0]
    if not series["observed"]:
        return ""
    points = [point for own in series.values() for point in own]
    x, y = plane([pair for pair, _ in points], [value for _, value in points], y_log=True)
    drawn = [part for kind, own in series.items() for part in _series(kind, own, x, y)]
    return chart("RoPE frequencies, fitted", x, y, "pair of dimensions", "radians per position", drawn)


def score_curve(finding: Finding) -> str:
    """Scores against q.k in the first layer of a finding, some of them, with the fitted law of each side."""
    sides = {kind: _points(finding.evidence.get(side)) for kind, side in SIDES.items()}
    if not sides["observed"]:
        return ""
    every = [point for own in sides.values() for point in own]
    x, y = plane([point[0] for point in every], [value for point in every for value in point[1:]])
    laws = [
        _stroke(kind, " ".join(f"{x.at(at):.1f},{y.at(law):.1f}" for at, _, law in own))
        for kind, own in sides.items() if own
    ]  # fmt: skip
    dots = [
        f'<circle cx="{x.at(at):.1f}" cy="{y.at(score):.1f}" r="1.6" class="observed"/>'
        for at, score, _ in sides["observed"]
    ]
    return chart(f"{finding.knob}: scores of the first head", x, y, "q.k", "score", [*laws, *dots])


def _points(evidence: Any) -> list[tuple[float, float, float]]:
    """Those of the first entry that has any."""
    found = next((entry["points"] for entry in _entries(evidence) if entry.get("points")), ())
    return [(at, score, law) for at, score, law in found if all(map(_is_number, (at, score, law)))]


def legend(entries: Mapping[str, str]) -> str:
    """Marks and what they stand for, by class."""
    items = "".join(
        f'<li><svg viewBox="0 0 20 10" aria-hidden="true">{_stroke(kind, "0,5 20,5")}{_mark(kind, 10, 5)}</svg>{escape(text)}</li>'
        for kind, text in entries.items()
    )
    return f'<ul class="key">{items}</ul>'


def _after_blocks(sites: Sequence[SiteDelta]) -> Points:
    ends = (site for site in sites if site.layer is not None and site.site.endswith(".resid_post"))
    return [(float(site.layer or 0), site.noise_ratio) for site in ends if site.noise_ratio is not None]


def _introduced(sites: Sequence[SiteDelta]) -> Points:
    most: dict[int, float] = {}
    for site in sites:
        if site.layer is not None and site.introduced_ratio is not None:
            most[site.layer] = max(most.get(site.layer, 0.0), site.introduced_ratio)
    return [(float(layer), value) for layer, value in sorted(most.items())]


def _entries(evidence: Any) -> list[dict[str, Any]]:
    return [entry for entry in evidence or () if isinstance(entry, dict)] if isinstance(evidence, (list, tuple)) else []


def _fitted(evidence: Any) -> Points:
    return [
        (float(entry["layer"]), float(entry["value"]))
        for entry in _entries(evidence)
        if _is_number(entry.get("layer")) and _is_number(entry.get("value"))
    ]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _padded(layers: Sequence[float]) -> list[float]:
    return [min(layers) - 0.5, max(layers) + 0.5]


def _wider(own: Axis) -> Axis:
    """A fifth more on both ends, and never less than 5 % of the value: scatter within rounding is not drawn as a trend."""
    middle = (own.low + own.high) / 2.0
    half = max(0.7 * (own.high - own.low), LEAST_SHOWN * abs(middle))
    return Axis(middle - half, middle + half, own.start, own.stop)


def _level(x: Axis, y: Axis, value: float, kind: str, text: str) -> str:
    at = y.at(value)
    line = f'<line x1="{x.start:.1f}" y1="{at:.1f}" x2="{x.stop:.1f}" y2="{at:.1f}" class="{kind}"/>'
    return f'{line}<text x="{x.start + 3:.1f}" y="{at - 4:.1f}" class="start">{escape(text)}</text>'


def _series(kind: str, points: Points, x: Axis, y: Axis) -> list[str]:
    places = [(x.at(at), y.at(value)) for at, value in points]
    if not places:
        return []
    return [_stroke(kind, " ".join(f"{a:.1f},{b:.1f}" for a, b in places)), *(_mark(kind, a, b) for a, b in places)]


def _stroke(kind: str, points: str) -> str:
    dashed = " dashed" if kind in ("introduced", "reference") else ""
    return f'<polyline points="{points}" class="{kind}{dashed}"/>'


def _mark(kind: str, x: float, y: float) -> str:
    """A disc, an empty square, a triangle, an empty circle."""
    if kind == "introduced":
        return f'<rect x="{x - 2.7:.1f}" y="{y - 2.7:.1f}" width="5.4" height="5.4" class="{kind}"/>'
    if kind == "patched":
        return f'<path d="M{x:.1f} {y - 3.4:.1f}l3.4 6h-6.8z" class="{kind}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.6 if kind == "reference" else 2.6}" class="{kind}"/>'
