"""Charts as separate files: SVG that includes its style, and PNG."""

from __future__ import annotations

from parity_audit.report.pictures.axes import HEIGHT, WIDTH

CHART_STYLE = """
svg text { font: 9px system-ui, sans-serif; fill: #555; text-anchor: middle }
svg .title { font-size: 11px; fill: #111 } svg .end { text-anchor: end } .frame { fill: none; stroke: #bbb }
.point { fill: #2456a6; fill-opacity: .45 } .line { fill: none; stroke: #b3261e } .bin { fill: #c5d3ea }
.extreme { fill: none; stroke: #2456a6 }
"""
SCALE = 3
"""Pixels of a PNG per unit of the SVG. A chart then has 1080 x 780 pixels, enough to be sharp in a column of a paper."""


def standalone(svg: str) -> str:
    """Return a chart with its size and style included, so that any viewer shows it as the page does."""
    opening, rest = svg.split(">", 1)
    return f'{opening} width="{WIDTH}" height="{HEIGHT}"><style>{CHART_STYLE}</style>{rest}\n'


def png(svg: str) -> bytes:
    """Return the chart as a PNG on a white background.

    Raises:
        ImportError: resvg_py is not installed.
    """
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=standalone(svg), background="#ffffff", zoom=SCALE))
