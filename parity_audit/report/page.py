"""The frame of every HTML page: one style, a content security policy, and at most one script, allowed by its hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from parity_audit.report.blocks import Block, Line
from parity_audit.report.html import drawn, text_of

SCRIPT = """
for (const pre of document.querySelectorAll("pre")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(pre);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  const box = document.createElement("div");
  box.className = "code";
  pre.replaceWith(box);
  box.append(button, pre);
}
"""
"""Adds a copy button to each block of code. The page is complete without it. The policy allows this script only, by its hash."""


@cache
def style() -> str:
    """Return the style sheet of every page: for light and dark themes, wide and narrow screens, and print."""
    return files("parity_audit.report").joinpath("page.css").read_text(encoding="utf-8")


def policy(script: str = "") -> str:
    """Return a content security policy under which nothing is loaded and only `script` runs.

    It holds even if the name of a model or the text of a token contains markup.
    """
    rules = "default-src 'none'; style-src 'unsafe-inline'"
    if not script:
        return rules
    return f"{rules}; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def with_title(about: str, blocks: Sequence[Block], figures: str = "") -> str:
    """Return the body of a page whose first block is its headline.

    Args:
        about: the subject of the page, as plain text.
        figures: HTML between the headline and the other blocks.
    """
    first, *rest = blocks
    title = text_of(first.text) if isinstance(first, Line) else ""
    inside = "".join(drawn(block) for block in rest)
    header = f'<header><p class="eyebrow">{text_of(about)}</p><h1>{title}</h1></header>'
    return f"{header}\n{f'<section>{figures}</section>' if figures else ''}<section>{inside}</section>"


def page(*, title: str, body: str, copies: bool = False) -> str:
    """Return a whole page.

    Args:
        title: plain text; this function escapes it.
        body: HTML in which all text is escaped already.
        copies: whether blocks of code get a copy button.
    """
    script = SCRIPT if copies else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{text_of(title)}</title><style>{style()}</style></head>\n"
        f'<body class="page"><main>\n{body}\n</main>{f"<script>{script}</script>" if script else ""}</body></html>\n'
    )
