"""The blocks that a report consists of, independent of the output format: lines, pairs, tables, paragraphs and code.

`content` and `candidate_content` build a report once, as a list of these blocks. The terminal, Markdown and HTML formats
each draw every kind of block, so that no format can omit a fact that another format shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Union

GOOD, BAD, UNSURE, BOLD, DIM = "good", "bad", "unsure", "bold", "dim"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of (text, style) pieces.

    `level` is 0 for text that is not a title, 1 for the headline, 2 for the title of a candidate, 3 of a section, and 4 of
    a part of a section.
    """

    pieces: tuple[tuple[str, str], ...]
    level: int = 0

    @property
    def text(self) -> str:
        """Return the text of the line without styles."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Rows of (name, text); `width` is the minimum width of the column of names, in characters."""

    rows: tuple[tuple[str, str], ...]
    indent: int = 2
    width: int = 0
    style: str = DIM


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A noise ratio, drawn as a bar on a logarithmic scale with a mark at `limit`; `wrong` selects the colour."""

    ratio: float | None
    limit: float
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns with titles; `right` has the indices of the columns that are aligned to the right."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    right: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """Text of any length; `wrap` is false for a path, so that it can be copied."""

    text: str
    indent: int = 0
    wrap: bool = True


@dataclass(frozen=True, kw_only=True)
class Code:
    """Python code to copy. `fold`: a format of fixed width may break long lines at places where Python allows it."""

    text: str
    fold: bool = False


@dataclass(frozen=True, kw_only=True)
class Space:
    """An empty line in the terminal; other formats draw nothing."""


Block = Union[Line, Pairs, Table, Paragraph, Code, Space]
SPACE = Space()


def styled(*pieces: tuple[str, str], level: int = 0) -> Line:
    """Return one line of (text, style) pieces."""
    return Line(pieces=pieces, level=level)


def heading(text: str) -> Line:
    """Return the title of a section."""
    return Line(pieces=((text, BOLD),), level=3)


def paragraph(text: str, indent: int = 0) -> Paragraph:
    """Return text that is wrapped."""
    return Paragraph(text=text, indent=indent)


def pairs(rows: Iterable[tuple[str, str]], indent: int = 2) -> Pairs:
    """Return rows of (name, text) as a block of two columns."""
    return Pairs(rows=tuple(rows), indent=indent)


def columns(titles: Sequence[str], rows: Iterable[Sequence[str | Bar]], right: Sequence[int] = ()) -> Table:
    """Return a table; `right` has the indices of the columns that are aligned to the right."""
    return Table(titles=tuple(titles), rows=tuple(tuple(row) for row in rows), right=tuple(right))


def code(text: str, *, fold: bool = False) -> list[Block]:
    """Return a list with one block of code, empty if there is no code."""
    return [Code(text=text, fold=fold)] if text else []
