"""Building blocks of the terminal report. Everything is `Text`, never markup, so foreign text cannot be obeyed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from parity_audit.report.escape import plain

Part = str | Text | Table | Padding


def heading(text: str) -> Text:
    """The title of a section."""
    return Text(plain(text), style="bold")


def styled(*pieces: tuple[str, str]) -> Text:
    """One line of (text, style) pieces."""
    line = Text(overflow="fold")
    for text, style in pieces:
        line.append(plain(text), style=style)
    return line


def paragraph(text: object, indent: int = 0) -> Part:
    """Wrapped text; a word longer than the line is folded, never cut."""
    body = Text(plain(text), overflow="fold")
    return Padding(body, (0, 0, 0, indent)) if indent else body


def pairs(rows: Iterable[tuple[str, str]], indent: int = 2) -> Part:
    """Names and what is said of them, in two columns; long names are never cut."""
    rows = [(plain(name), plain(text)) for name, text in rows]
    wide = max((len(name) for name, _ in rows), default=0)
    if wide > 30:
        return paragraph("\n".join(f"{name}: {text}" for name, text in rows), indent)
    return hanging([(Text(name, style="dim"), Text(text, overflow="fold")) for name, text in rows], wide, indent)


def hanging(rows: Iterable[tuple[Text, Text]], width: int, indent: int = 2) -> Part:
    """Two columns, the first `width` wide; the second wraps under itself."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=width)
    table.add_column(overflow="fold")
    for first, second in rows:
        table.add_row(first, second)
    return Padding(table, (0, 0, 0, indent))


def columns(titles: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[int] = ()) -> Part:
    """A table without lines; cells that do not fit are folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False, pad_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[cell if isinstance(cell, Text) else Text(plain(cell), overflow="fold") for cell in row])
    return Padding(table, (0, 0, 0, 2))


def code_lines(code: str) -> list[Part]:
    """Code printed as it is: no wrapping, so that it can be copied from the terminal."""
    return [f"    {plain(line)}" for line in code.splitlines()]
