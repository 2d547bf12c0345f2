"""The frame of a chart: axes that map values to pixels, their ticks and labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, MARGIN = 360, 260, 46


@dataclass(frozen=True)
class Axis:
    """A map of values from `low` to `high` to pixels from `start` to `stop`; if `low` is the larger value, the axis is reversed."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value; a value outside the axis is placed at its end."""
        place, low, high = (math.log10(max(x, self.low)) if self.log else x for x in (value, self.low, self.high))
        share = (place - low) / (high - low) if high != low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.stop - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """Return round values on the axis: powers of ten if it is logarithmic and contains at least two of them."""
        powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1) if self.log else ()
        if len(powers) > 1:
            return [10.0**power for power in list(powers)[:: max(1, len(powers) // count)]]
        low, high = sorted((self.low, self.high))
        step = _round_step((high - low) / count)
        return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def axis(values: Sequence[float], start: float, stop: float, *, log: bool = False) -> Axis:
    """Return an axis that contains all finite values; a logarithmic axis contains the positive ones only."""
    some = [value for value in values if math.isfinite(value) and (value > 0.0 or not log)]
    low, high = (min(some), max(some)) if some else (1.0, 10.0)
    if low == high:
        low, high = (low / 2.0, high * 2.0) if log else (low - 0.5, high + 0.5)
    return Axis(low, high, start, stop, log)


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw)


def chart(title: str, x: Axis, y: Axis, x_label: str, y_label: str, body: Sequence[str]) -> str:
    """Return one SVG with a frame, ticks, labels and the elements of `body`; title and labels are escaped."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text x="{WIDTH / 2}" y="14" class="title">{escape(title)}</text>',
        f'<rect x="{x.start}" y="{y.stop}" width="{x.stop - x.start}" height="{y.start - y.stop}" class="frame"/>',
        *_ticks(x, lambda at, text: f'<text x="{at:.1f}" y="{y.start + 14}" class="tick">{text}</text>'),
        *_ticks(y, lambda at, text: f'<text x="{x.start - 4}" y="{at + 3:.1f}" class="tick end">{text}</text>'),
        f'<text x="{(x.start + x.stop) / 2}" y="{HEIGHT - 6}" class="label">{escape(x_label)}</text>',
        f'<text transform="translate(10 {(y.start + y.stop) / 2}) rotate(-90)" class="label">{escape(y_label)}</text>',
        *body,
        "</svg>",
    ]
    return "\n".join(parts)


def _ticks(own: Axis, draw: Callable[[float, str], str]) -> list[str]:
    return [draw(own.at(value), f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-")) for value in own.ticks()]


def plane(
    xs: Sequence[float], ys: Sequence[float], *, x_log: bool = False, y_log: bool = False, top: float = 24
) -> tuple[Axis, Axis]:
    """Return the x and y axes of a chart of the usual size, whose top is at pixel `top`; SVG pixels count downwards."""
    return (
        axis(xs, MARGIN, WIDTH - 34, log=x_log),
        axis(ys, HEIGHT - MARGIN + 6, top, log=y_log),
    )
