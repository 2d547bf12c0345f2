"""Charts of an audit: noise ratios by layer, and the constants, RoPE frequencies and scores fitted on both sides."""

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
"""The minimum half-height of a chart of fitted constants, as a share of the value in its middle."""
SIDES = {"reference": "reference", "observed": "candidate"}
"""The mark (CSS class) of each side of a fit, and the key of that side in the evidence."""


def noise_by_layer(candidate: Candidate) -> str:
    """Return a chart of the noise ratio of the residual stream after each block, as shipped and patched.

    A third series is the largest ratio that one component of the block introduces. The text is empty without values.
    """
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
    """Return a chart of a constant as fitted to the activations of each layer, on both sides, with the spec's value as a line.

    The text is empty for another kind of finding or without fitted values of the candidate.
    """
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
    """Return a chart of the rotation angle per position of each pair of dimensions, on both sides.

    The angles are those fitted in the first layer whose evidence has them. The text is empty if the candidate has none.
    """
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
    """Return a chart of attention scores against q.k, with the fitted formula of each side as a line.

    The points are a sample of the candidate's scores in the first layer whose evidence has points.
    """
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
    """Return the points (q.k, score, fitted score) of the first entry of the evidence that has any."""
    found = next((entry["points"] for entry in _entries(evidence) if entry.get("points")), ())
    return [(at, score, law) for at, score, law in found if all(map(_is_number, (at, score, law)))]


def legend(entries: Mapping[str, str]) -> str:
    """Return a legend of the marks and their texts; the keys of `entries` are CSS classes."""
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
    """Extend an axis by a fifth of its length at both ends, and to at least 5 % of its middle value on either side.

    Otherwise scatter within rounding would fill the chart and look like a trend.
    """
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
    """Return the mark of one point: a square (introduced), a triangle (patched), or a circle, larger for the reference."""
    if kind == "introduced":
        return f'<rect x="{x - 2.7:.1f}" y="{y - 2.7:.1f}" width="5.4" height="5.4" class="{kind}"/>'
    if kind == "patched":
        return f'<path d="M{x:.1f} {y - 3.4:.1f}l3.4 6h-6.8z" class="{kind}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.6 if kind == "reference" else 2.6}" class="{kind}"/>'
