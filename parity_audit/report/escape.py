"""Foreign text made harmless: control characters shown, Markdown's own characters escaped."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")

ASCII = str.maketrans({"█": "#", "│": "|", "─": "-", "×": "x", "…": "...", "±": "+-", "→": "->", "•": "*"})


def plain(text: object) -> str:
    """Text without control characters: an escape sequence in an engine's message is shown, not obeyed."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", str(text))


def one_line(text: object) -> str:
    """`plain`, with line breaks as spaces."""
    return " ".join(plain(text).split())


def markdown(text: object) -> str:
    """One line of text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def code_span(text: object) -> str:
    """Text as inline code, whatever back-ticks it holds; `|` is escaped for tables."""
    line = one_line(text).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def fenced(code: str, language: str) -> str:
    """A code block whose fence is longer than any run of back-ticks inside."""
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", code)), default=0) + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def ascii_text(text: str) -> str:
    """The same report for a terminal that only speaks ASCII."""
    return text.translate(ASCII).encode("ascii", "backslashreplace").decode("ascii")
