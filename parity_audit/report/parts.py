"""Blocks as objects that rich prints. Text is never passed as markup, so that text from a model cannot change the output."""

from __future__ import annotations

from functools import singledispatch

from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from parity_audit.report.blocks import (
    BAD,
    BOLD,
    DIM,
    GOOD,
    UNSURE,
    Bar,
    Block,
    Code,
    Line,
    Pairs,
    Paragraph,
    Space,
    Table,
)
from parity_audit.report.code import fold_code
from parity_audit.report.escape import plain
from parity_audit.report.numbers import bar_text

Part = str | Text | Grid | Padding
STYLES = {GOOD: "bold green", BAD: "bold red", UNSURE: "bold yellow", BOLD: "bold", DIM: "dim", "": ""}
INDENT = 4
WIDEST_NAME = 30


@singledispatch
def drawn(block: Block, width: int) -> list[Part]:
    """Return the parts to print for a block; a `str` is printed as it is, without wrapping."""
    raise TypeError(f"no drawing of {block!r}")


@drawn.register
def _(block: Space, width: int) -> list[Part]:
    return [""]


@drawn.register
def _(block: Line, width: int) -> list[Part]:
    line = Text(overflow="fold")
    for text, style in block.pieces:
        line.append(plain(text), style=STYLES[style])
    return [line]


@drawn.register
def _(block: Paragraph, width: int) -> list[Part]:
    """Return the text, in which a word longer than the line is folded, not cut; or unwrapped text as it is."""
    if not block.wrap:
        return [plain(block.text)]
    body = Text(plain(block.text), overflow="fold")
    return [Padding(body, (0, 0, 0, block.indent)) if block.indent else body]


@drawn.register
def _(block: Pairs, width: int) -> list[Part]:
    """Return two columns, or one `name: text` line per row if a name is longer than `WIDEST_NAME` characters."""
    rows = [(plain(name), plain(text)) for name, text in block.rows]
    wide = max((len(name) for name, _ in rows), default=0)
    if wide > WIDEST_NAME:
        text = "\n".join(f"{name}: {text}" for name, text in rows)
        return [Padding(Text(text, overflow="fold"), (0, 0, 0, block.indent))]
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=max(wide, block.width))
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(name, style=STYLES[block.style]), Text(text, overflow="fold"))
    return [Padding(grid, (0, 0, 0, block.indent))]


@drawn.register
def _(block: Table, width: int) -> list[Part]:
    """Return a table without rules; cells that do not fit are folded."""
    grid = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False, pad_edge=False)
    for number, title in enumerate(block.titles):
        grid.add_column(title, justify="right" if number in block.right else "left", overflow="fold")
    for row in block.rows:
        grid.add_row(*[_cell(cell) for cell in row])
    return [Padding(grid, (0, 0, 0, 2))]


def _cell(cell: str | Bar) -> Text:
    if isinstance(cell, Bar):
        return Text(bar_text(cell.ratio, cell.limit), style="red" if cell.wrong else "green", no_wrap=True)
    return Text(plain(cell), overflow="fold")


@drawn.register
def _(block: Code, width: int) -> list[Part]:
    """Return the lines unwrapped, so that they can be copied; `fold_code` breaks long ones if the block allows it."""
    text = fold_code(block.text, width - INDENT) if block.fold else block.text
    return [" " * INDENT + plain(line) for line in text.splitlines()]
