"""Fold the code of a patch to a width without changing what it does."""

from __future__ import annotations

INDENT = "    "


def fold_code(code: str, width: int) -> str:
    """Break lines that are too long, after commas inside brackets; a line without such a comma stays long."""
    return "\n".join("\n".join(_fold_line(line, width)) for line in code.splitlines())


def _fold_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    margin = line[: len(line) - len(line.lstrip())] + INDENT
    out, current = [], ""
    for piece in _pieces(line):
        if current.strip() and len(current) + len(piece.rstrip()) > width:
            out.append(current.rstrip())
            current = margin + piece.lstrip()
        else:
            current += piece
    return [*out, current.rstrip()]


def _pieces(line: str) -> list[str]:
    """Split a line after each comma inside brackets and outside strings, where Python allows a line break.

    A line with a comment is not split.
    """
    pieces, depth, quote, skip = [""], 0, "", False
    for char in line:
        pieces[-1] += char
        if skip:
            skip = False
        elif quote:
            skip, quote = char == "\\", "" if char == quote else quote
        elif char == "#":
            return [line]
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth > 0:
            pieces.append("")
    return pieces
