"""What a report consists of, before any format: lines, pairs, tables, paragraphs and code.

`content` and `candidate_content` say everything once, as these blocks; the terminal, Markdown and HTML each draw every kind of
block. So no format can leave out what another one says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Union

GOOD, BAD, UNSURE, BOLD, DIM = "good", "bad", "unsure", "bold", "dim"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of (text, style) pieces. `level`: 1 the headline, 2 a candidate, 3 a section, 4 a part of one, 0 no title."""

    pieces: tuple[tuple[str, str], ...]
    level: int = 0

    @property
    def text(self) -> str:
        """The line without styles."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Names and what is said of them; `width` is the least width of the names' column."""

    rows: tuple[tuple[str, str], ...]
    indent: int = 2
    width: int = 0
    style: str = DIM


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A noise ratio on a logarithmic scale, with its limit marked."""

    ratio: float | None
    limit: float
    wrong: bool


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns with titles; `right` are the numbers of those that align to the right."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    right: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """Text of any length; a path to copy is not wrapped."""

    text: str
    indent: int = 0
    wrap: bool = True


@dataclass(frozen=True, kw_only=True)
class Code:
    """Python to copy. `fold`: where it is printed at a fixed width, long lines may be broken where Python allows it."""

    text: str
    fold: bool = False


@dataclass(frozen=True, kw_only=True)
class Space:
    """An empty line of the terminal."""


Block = Union[Line, Pairs, Table, Paragraph, Code, Space]
SPACE = Space()


def styled(*pieces: tuple[str, str], level: int = 0) -> Line:
    """One line of (text, style) pieces."""
    return Line(pieces=pieces, level=level)


def heading(text: str) -> Line:
    """The title of a section."""
    return Line(pieces=((text, BOLD),), level=3)


def paragraph(text: str, indent: int = 0) -> Paragraph:
    """Wrapped text."""
    return Paragraph(text=text, indent=indent)


def pairs(rows: Iterable[tuple[str, str]], indent: int = 2) -> Pairs:
    """Names and what is said of them, in two columns."""
    return Pairs(rows=tuple(rows), indent=indent)


def columns(titles: Sequence[str], rows: Iterable[Sequence[str | Bar]], right: Sequence[int] = ()) -> Table:
    """A table."""
    return Table(titles=tuple(titles), rows=tuple(tuple(row) for row in rows), right=tuple(right))


def code(text: str, *, fold: bool = False) -> list[Block]:
    """A block of code, none where there is no code."""
    return [Code(text=text, fold=fold)] if text else []
