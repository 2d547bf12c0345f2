"""Numbers, values of knobs and noise bars as text for a reader; report.json keeps the full precision."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.filesize import decimal

from parity_audit.core.by_layer import each_layer, in_layers
from parity_audit.core.limits import PARITY_RATIO

BAR_FROM, BAR_TO = -1.0, 5.0
BAR_WIDTH = 20
FULL, MARK = "█", "│"


def number(value: float | None) -> str:
    """Return a number with three significant digits; `-` for None."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.3g}"


def byte_size(count: int) -> str:
    """Return a number of bytes in a decimal unit: `49.1 GB`."""
    return decimal(count)


def ratio(value: float | None) -> str:
    """Return a multiple of the noise floor, such as `3.2x`; `-` for None."""
    return "-" if value is None else f"{number(value)}x"


def shown(value: Any) -> str:
    """Return a knob's value as text; floats have six significant digits, and nothing else is shortened."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if each_layer(value) is not None:
        return in_layers(value, shown)
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(_rounded(value), ensure_ascii=False)
    return str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def bar(value: float | None, limit: float) -> tuple[int, int]:
    """Return how many of `BAR_WIDTH` cells a noise ratio fills on a log scale, and the cell of the limit's mark.

    A ratio above the limit always extends beyond the mark; a ratio up to the limit never does.
    """
    filled, mark = _cells(value), _cells(limit)
    above = value is not None and value > limit
    return (max(filled, mark + 2) if above else min(filled, mark)), mark


def _cells(value: float | None) -> int:
    if value is None or value <= 0:
        return 0
    place = (math.log10(value) - BAR_FROM) / (BAR_TO - BAR_FROM)
    return max(0, min(BAR_WIDTH, round(place * BAR_WIDTH)))


def bar_text(value: float | None, limit: float) -> str:
    """Return the bar as text; the mark of the limit is drawn over the bar."""
    filled, mark = bar(value, limit)
    cells = [FULL if cell < filled else " " for cell in range(BAR_WIDTH)]
    cells[mark] = MARK
    return "".join(cells)


def scale_text() -> str:
    """Return the scale above the bars, with ratios at their positions."""
    cells = [" "] * BAR_WIDTH
    for value, text in ((0.1, "0.1"), (PARITY_RATIO, "4x"), (100.0, "100"), (1e4, "1e4")):
        at = _cells(value)
        cells[at : at + len(text)] = text
    return "".join(cells)


def seconds(value: float) -> str:
    """Return a duration as text: in seconds below two minutes, else in minutes."""
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"
