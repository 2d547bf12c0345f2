"""The skeleton of every HTML page: one style, a policy that allows no request, and at most one script, named by its hash."""

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
"""Adds a button that copies to each block of code. The page says everything without it; its hash in the policy allows it alone."""


@cache
def style() -> str:
    """The style sheet of every page: light and dark, wide and narrow, and print."""
    return files("parity_audit.report").joinpath("page.css").read_text(encoding="utf-8")


def policy(script: str = "") -> str:
    """Nothing is loaded and nothing but `script` runs, whatever a model or a token is called."""
    rules = "default-src 'none'; style-src 'unsafe-inline'"
    if not script:
        return rules
    return f"{rules}; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def with_title(about: str, blocks: Sequence[Block], figures: str = "") -> str:
    """The body of a page whose first block is its headline.

    Args:
        about: what the page is of, plain text.
        figures: HTML between the headline and the rest.
    """
    first, *rest = blocks
    title = text_of(first.text) if isinstance(first, Line) else ""
    inside = "".join(drawn(block) for block in rest)
    header = f'<header><p class="eyebrow">{text_of(about)}</p><h1>{title}</h1></header>'
    return f"{header}\n{f'<section>{figures}</section>' if figures else ''}<section>{inside}</section>"


def page(*, title: str, body: str, copies: bool = False) -> str:
    """A whole page.

    Args:
        title: plain text; it is escaped here.
        body: HTML, made of escaped text.
        copies: whether blocks of code get a button.
    """
    script = SCRIPT if copies else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{text_of(title)}</title><style>{style()}</style></head>\n"
        f'<body class="page"><main>\n{body}\n</main>{f"<script>{script}</script>" if script else ""}</body></html>\n'
    )
