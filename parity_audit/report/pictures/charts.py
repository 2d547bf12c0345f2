"""The charts of the log-probability report: scatter with marginals, lines over bins, a heat map of sequence by position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parity_audit.core.logprob_report import TokenBin
from parity_audit.report.pictures.axes import HEIGHT, MARGIN, WIDTH, Axis, chart, plane

MOST_POINTS = 1500
"""The approximate most points of one scatter: more make the file large and the picture no clearer. A third of them are those
furthest from the diagonal."""
BARS = 24
SMALLEST = 1e-30
"""Replaces a probability of zero on a logarithmic axis."""
MARGINAL = 26


def scatter(title: str, xs: Sequence[float], ys: Sequence[float], *, labels: tuple[str, str], log: bool = False) -> str:
    """Return a chart of points with the diagonal and a histogram along each axis; `drawn` chooses among many points."""
    x, y = plane([*xs, *ys], [*xs, *ys], x_log=log, y_log=log, top=24 + MARGINAL)
    points = [f'<circle cx="{x.at(xs[i]):.1f}" cy="{y.at(ys[i]):.1f}" r="1.6" class="point"/>' for i in drawn(xs, ys)]
    diagonal = f'<line x1="{x.at(x.low):.1f}" y1="{y.at(x.low):.1f}" x2="{x.at(x.high):.1f}" y2="{y.at(x.high):.1f}" class="line"/>'
    marginals = [*_marginal(x, xs, y.stop, upright=True), *_marginal(y, ys, x.stop, upright=False)]
    return chart(title, x, y, *labels, [*marginals, diagonal, *points])


def drawn(xs: Sequence[float], ys: Sequence[float]) -> list[int]:
    """Return the indices of the points to draw: all, or above `MOST_POINTS` those furthest from the diagonal and every n-th."""
    if len(xs) <= MOST_POINTS:
        return list(range(len(xs)))
    furthest = sorted(range(len(xs)), key=lambda i: -abs(xs[i] - ys[i]))[: MOST_POINTS // 3]
    step = math.ceil(len(xs) / (MOST_POINTS - len(furthest)))
    return sorted({*furthest, *range(0, len(xs), step)})


def _counts(own: Axis, values: Sequence[float]) -> list[float]:
    counts = [0] * BARS
    for value in values:
        share = (own.at(value) - own.start) / (own.stop - own.start)
        counts[min(BARS - 1, int(share * BARS))] += 1
    return [count / max(counts) for count in counts] if any(counts) else [0.0] * BARS


def _marginal(own: Axis, values: Sequence[float], edge: float, *, upright: bool) -> list[str]:
    """Return a histogram along an axis, with bars that start at `edge` and point upwards if `upright`, else to the right."""
    step = (own.stop - own.start) / BARS
    bars = []
    for number, share in enumerate(_counts(own, values)):
        low, high = sorted((own.start + number * step, own.start + (number + 1) * step))
        size = share * (MARGINAL - 4)
        x, y, width, height = (low, edge - size, high - low, size) if upright else (edge, low, size, high - low)
        bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="bin"/>')
    return bars


def bins(title: str, groups: Sequence[TokenBin], *, labels: tuple[str, str], x_log: bool = False) -> str:
    """Return a chart of each group's mean (line) and largest value (dots) on a logarithmic axis; zeros are not drawn."""
    mids = [math.sqrt(max(one.low, SMALLEST) * one.high) if x_log else (one.low + one.high) / 2.0 for one in groups]
    x, y = plane(mids, [value for one in groups for value in (one.mean, one.largest)], x_log=x_log, y_log=True)
    places = list(zip(mids, groups, strict=True))
    means = " ".join(f"{x.at(mid):.1f},{y.at(one.mean):.1f}" for mid, one in places if one.mean > 0.0)
    tops = [
        f'<circle cx="{x.at(mid):.1f}" cy="{y.at(one.largest):.1f}" r="2.2" class="extreme"/>'
        for mid, one in places
        if one.largest > 0.0
    ]
    return chart(title, x, y, *labels, [f'<polyline points="{means}" class="line"/>', *tops])


def heat_map(title: str, rows: Sequence[Sequence[float | None]], *, labels: tuple[str, str]) -> str:
    """Return a heat map with one cell per value, coloured on a logarithmic scale; None is left white.

    The scale begins at a quarter of the median of the non-zero values, or at a tenth of the largest value if that is lower,
    and ends at the largest.
    """
    values = sorted(value for row in rows for value in row if value)
    top = values[-1] if values else 1.0
    low = min(values[len(values) // 2] / 4.0, top / 10.0) if values else 0.1
    width = max(len(row) for row in rows)
    x, y = Axis(0.0, width, MARGIN, WIDTH - 34), Axis(len(rows), 0.0, HEIGHT - MARGIN + 6, 24)
    cell = (x.stop - x.start) / width, (y.start - y.stop) / len(rows)
    body = []
    for number, row in enumerate(rows):
        for place, value in enumerate(row):
            if value is not None:
                share = math.log(max(value, low) / low) / math.log(top / low)
                body.append(
                    f'<rect x="{x.at(place):.1f}" y="{y.at(number):.1f}" width="{cell[0] + 0.3:.1f}" '
                    f'height="{cell[1] + 0.3:.1f}" fill="rgb({_heat(share)})"/>'
                )
    return chart(title, x, y, *labels, body)


def _heat(share: float) -> str:
    """Return the RGB colour of a share from 0 (near white) to 1 (dark red)."""
    return f"{round(255 - 95 * share)},{round(245 - 225 * share)},{round(235 - 215 * share)}"
