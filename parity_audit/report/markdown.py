"""The report as Markdown for an issue or a pull request; all text from models and engines is escaped or in code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from parity_audit.core.report import Report
from parity_audit.report.blocks import Bar, Block, Code, Line, Pairs, Paragraph, Space, Table
from parity_audit.report.content import content
from parity_audit.report.escape import code_span, fenced, markdown, plain
from parity_audit.report.numbers import bar_text


def render(report: Report, *, where: str = "") -> str:
    """Return the whole report; `where` is the path of report.json."""
    return written(content(report, where=where))


def written(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown."""
    return "\n".join(line for block in blocks for line in drawn(block))


@singledispatch
def drawn(block: Block) -> list[str]:
    """Return the lines of one block; the last is empty. A `Space` has no lines."""
    raise TypeError(f"no drawing of {block!r}")


@drawn.register
def _(block: Space) -> list[str]:
    return []


@drawn.register
def _(block: Line) -> list[str]:
    text = markdown(block.text.strip("─ "))
    return [f"{'#' * block.level} {text}" if block.level else text, ""]


@drawn.register
def _(block: Paragraph) -> list[str]:
    return [markdown(block.text), ""]


@drawn.register
def _(block: Pairs) -> list[str]:
    """Return a list with one item per row; a row without a name, which continues the row before, has the text only."""
    return [*[f"- {f'**{markdown(name)}**: ' if name else ''}{markdown(text)}" for name, text in block.rows], ""]


@drawn.register
def _(block: Table) -> list[str]:
    """Return a table. Bars are kept, as inline code, because the numbers alone do not show where the limit is."""
    rules = [" ---: " if number in block.right else " --- " for number in range(len(block.titles))]
    rows = [[_cell(cell) for cell in row] for row in block.rows]
    return [_row(map(_title, block.titles)), f"|{'|'.join(rules)}|", *map(_row, rows), ""]


@drawn.register
def _(block: Code) -> list[str]:
    return [fenced("\n".join(plain(line) for line in block.text.splitlines()), "python"), ""]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _title(text: str) -> str:
    return markdown(text)


def _cell(cell: str | Bar) -> str:
    return code_span(bar_text(cell.ratio, cell.limit)) if isinstance(cell, Bar) else markdown(cell)
