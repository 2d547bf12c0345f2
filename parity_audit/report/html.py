"""The report as one HTML element for a notebook or a page: with its own style, no script, no link, and all text escaped.

The headline and the verdicts are always visible. Each candidate can be folded; it starts open if it is not at parity.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import singledispatch

from parity_audit.core.report import Candidate, Report
from parity_audit.report.blocks import Bar, Block, Code, Line, Pairs, Paragraph, Space, Table
from parity_audit.report.content import candidates, closing, opening
from parity_audit.report.escape import plain
from parity_audit.report.numbers import BAR_WIDTH, bar, ratio
from parity_audit.report.words import GOOD

STYLE = """
.parity-audit { max-width: 60em; font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
.parity-audit h3 { margin: 0 0 .5em; font-size: 1.15em } .parity-audit h4 { margin: 1.2em 0 .3em }
.parity-audit p { margin: .5em 0 } .parity-audit summary { margin: .6em 0; font-weight: bold; cursor: pointer }
.parity-audit table { border-collapse: collapse; margin: .3em 0 .6em; font-size: 13px }
.parity-audit td, .parity-audit th { padding: .1em .9em .1em 0; text-align: left !important; vertical-align: top }
.parity-audit .right { text-align: right !important; font-variant-numeric: tabular-nums; white-space: nowrap }
.parity-audit .dim, .parity-audit thead th { opacity: .65 } .parity-audit th { font-weight: normal; white-space: nowrap }
.parity-audit .bold { font-weight: bold } .parity-audit .good { color: #1a7f37; font-weight: bold }
.parity-audit .bad { color: #cf222e; font-weight: bold } .parity-audit .unsure { color: #9a6700; font-weight: bold }
.parity-audit pre { background: rgba(127, 127, 127, .12); padding: .6em .8em; overflow-x: auto; white-space: pre }
.parity-audit .bar { position: relative; width: 10em; height: .7em; background: rgba(127, 127, 127, .15) }
.parity-audit .bar i { position: absolute; left: 0; top: 0; bottom: 0; background: #1a7f37 }
.parity-audit .bar i.bad { background: #cf222e }
.parity-audit .bar b { position: absolute; top: 0; bottom: 0; border-left: 2px solid }
"""


def render(report: Report, *, where: str = "") -> str:
    """Return the whole report as one `div`."""
    parts = [*opening(report), *candidates(report), *closing(report, where)]
    body = "".join(_folding(*part) if isinstance(part, tuple) else drawn(part) for part in parts)
    return f'<div class="parity-audit"><style>{STYLE}</style>{body}</div>'


def _folding(candidate: Candidate, blocks: Sequence[Block]) -> str:
    title = next(block for block in blocks if isinstance(block, Line))
    rest = "".join(drawn(block) for block in blocks if block is not title)
    is_open = "" if candidate.verdict in GOOD else " open"
    return f"<details{is_open}><summary>{_spans(title)}</summary>{rest}</details>"


@singledispatch
def drawn(block: Block) -> str:
    """Return the HTML element of one block."""
    raise TypeError(f"no drawing of {block!r}")


@drawn.register
def _(block: Space) -> str:
    return ""


@drawn.register
def _(block: Line) -> str:
    tag = {0: "p", 1: "h3"}.get(block.level, "h4")
    return f"<{tag}>{_spans(block)}</{tag}>"


@drawn.register
def _(block: Paragraph) -> str:
    return f"<p>{text_of(block.text)}</p>"


@drawn.register
def _(block: Pairs) -> str:
    rows = (
        f'<tr><th scope="row" class="{block.style}">{text_of(name)}</th><td>{text_of(text)}</td></tr>'
        for name, text in block.rows
    )
    return f'<table class="pairs"><tbody>{"".join(rows)}</tbody></table>'


@drawn.register
def _(block: Table) -> str:
    titles = _row('th scope="col"', block.titles, block.right)
    rows = "".join(_row("td", row, block.right) for row in block.rows)
    return f'<div class="scroll"><table><thead>{titles}</thead><tbody>{rows}</tbody></table></div>'


@drawn.register
def _(block: Code) -> str:
    return f'<pre tabindex="0">{text_of(block.text)}</pre>'


def _row(tag: str, cells: Iterable[str | Bar], right: tuple[int, ...]) -> str:
    aligned = ((' class="right"' if number in right else "", cell) for number, cell in enumerate(cells))
    return "<tr>" + "".join(f"<{tag}{about}>{cell_of(cell)}</{tag[:2]}>" for about, cell in aligned) + "</tr>"


def cell_of(cell: str | Bar) -> str:
    """Return the content of one cell of a table."""
    if not isinstance(cell, Bar):
        return text_of(cell)
    filled, mark = (100 * cells // BAR_WIDTH for cells in bar(cell.ratio, cell.limit))
    colour = ' class="bad"' if cell.wrong else ""
    said = f"{ratio(cell.ratio)} the noise floor, limit {cell.limit:g}x"
    parts = f'<i{colour} style="width: {filled}%"></i><b style="left: {mark}%"></b>'
    return f'<div class="bar" role="img" aria-label="{said}">{parts}</div>'


def _spans(block: Line) -> str:
    return "".join(
        f'<span class="{style}">{text_of(text)}</span>' if style else text_of(text) for text, style in block.pieces
    )


def text_of(text: str) -> str:
    """Return text as HTML: control characters are shown, and markup is escaped."""
    return html.escape(plain(text), quote=True)
