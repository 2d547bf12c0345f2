"""The report for a terminal: verdict and reason first, then the evidence, at a fixed width, with or without colour."""

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
    """The whole report as text.

    Args:
        where: the path of report.json, named at the end.
        colour: with ANSI colours; without them nothing is lost.
        ascii_only: for an output that cannot encode the bars.
    """
    blocks = content(report, where=where)
    return printed(blocks, width=width, colour=colour, ascii_only=ascii_only)


def printed(blocks: Iterable[Block], *, width: int = WIDTH, colour: bool = False, ascii_only: bool = False) -> str:
    """Blocks as text at a fixed width."""
    stream = StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="standard" if colour else None,
        no_color=not colour, markup=False, highlight=False, emoji=False, legacy_windows=False,
        force_jupyter=False,  # else rich writes into the cell of a notebook, and nothing into `file`
    )  # fmt: skip
    for block in blocks:
        for part in drawn(block, width):
            console.print(part, soft_wrap=isinstance(part, str))
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"
    return ascii_text(text) if ascii_only else text
