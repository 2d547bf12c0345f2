"""Charts as files of their own: SVG with its style inside, and PNG."""

from __future__ import annotations

from parity_audit.report.pictures.axes import HEIGHT, WIDTH

CHART_STYLE = """
svg text { font: 9px system-ui, sans-serif; fill: #555; text-anchor: middle }
svg .title { font-size: 11px; fill: #111 } svg .end { text-anchor: end } .frame { fill: none; stroke: #bbb }
.point { fill: #2456a6; fill-opacity: .45 } .line { fill: none; stroke: #b3261e } .bin { fill: #c5d3ea }
.extreme { fill: none; stroke: #2456a6 }
"""
SCALE = 3
"""Pixels of a PNG per unit of the SVG: 1080 x 780, sharp in a column of a paper."""


def standalone(svg: str) -> str:
    """A chart with its size and style, as a file that any viewer shows like the page does."""
    opening, rest = svg.split(">", 1)
    return f'{opening} width="{WIDTH}" height="{HEIGHT}"><style>{CHART_STYLE}</style>{rest}\n'


def png(svg: str) -> bytes:
    """The chart on white.

    Raises:
        ImportError: resvg_py is not installed.
    """
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=standalone(svg), background="#ffffff", zoom=SCALE))
