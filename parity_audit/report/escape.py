"""Make text from models and engines safe to print: show control characters, escape Markdown's special characters."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~])")

ASCII = str.maketrans({"█": "#", "│": "|", "─": "-", "×": "x", "…": "...", "±": "+-", "→": "->", "•": "*"})


def plain(text: object) -> str:
    """Return text with control characters as `\\x1b`, so that a terminal does not execute an escape sequence in a message."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", str(text))


def one_line(text: object) -> str:
    """Return the text as `plain` does, on one line: each run of white space becomes one space."""
    return " ".join(plain(text).split())


def markdown(text: object) -> str:
    """Return one line of text in which Markdown's special characters are escaped."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def code_span(text: object) -> str:
    """Return text as inline code, with a fence longer than any run of back-ticks in it; `|` is escaped for tables."""
    line = one_line(text).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def fenced(code: str, language: str) -> str:
    """Return a code block, with a fence longer than any run of back-ticks in it."""
    fence = "`" * max(3, max((len(run) for run in re.findall("`+", code)), default=0) + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def ascii_text(text: str) -> str:
    """Return the text in ASCII, for a terminal that cannot encode more; unknown characters become backslash escapes."""
    return text.translate(ASCII).encode("ascii", "backslashreplace").decode("ascii")
