"""The report for a terminal, at a fixed width, with or without colour: verdicts and reasons, then the evidence."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console

from parity_audit.core.report import Report
from parity_audit.report.blocks import Block
from parity_audit.report.content import content
from parity_audit.report.escape import ascii_text
from parity_audit.report.parts import drawn

WIDTH = 80


def render(
    report: Report, *, where: str = "", width: int = WIDTH, colour: bool = False, ascii_only: bool = False
) -> str:
    """Return the whole report as text.

    Args:
        where: the path of report.json, which the last line names.
        colour: use ANSI colours, which only repeat what the text says.
        ascii_only: use ASCII only, for an output that cannot encode the bars.
    """
    blocks = content(report, where=where)
    return printed(blocks, width=width, colour=colour, ascii_only=ascii_only)


def printed(blocks: Iterable[Block], *, width: int = WIDTH, colour: bool = False, ascii_only: bool = False) -> str:
    """Return blocks as text at a fixed width."""
    stream = StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None,
        no_color=not colour, markup=False, highlight=False, emoji=False, legacy_windows=False,
        force_jupyter=False,  # otherwise rich writes to the cell of a notebook instead of `file`
    )  # fmt: skip
    for block in blocks:
        for part in drawn(block, width):
            console.print(part, soft_wrap=isinstance(part, str))
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
    return ascii_text(text) if ascii_only else text
