"""The cells of a fleet while they run: a table on a terminal, a line for each that ended in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from parity_audit.cli.progress import progress_for
from parity_audit.core.progress import Progress

if TYPE_CHECKING:
    from parity_audit.matrix.fleet.run import CellState

SHOWN = 30
"""Rows; where there are more cells, those that run come first, then those that ended last."""
WAITING, RUNNING = "waiting", "running"
COLOURS = {
    "parity": "green",
    "exact": "green",
    "mismatch": "red",
    "error": "yellow",
    "inconclusive": "yellow",
    RUNNING: "cyan",
}


def ignored(states: Sequence[CellState]) -> None:
    """Nobody looks."""


class _LiveTable:
    """Progress that is drawn as the table of all cells."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        """The table says it."""

    def watch(self, states: Sequence[CellState]) -> None:
        """Draw the cells as they are now."""
        self.live.update(table_of(states), refresh=True)


def table_of(states: Sequence[CellState]) -> Table:
    """One row per cell, the running ones first; what does not fit is counted."""
    ended = [one for one in states if one.state not in (WAITING, RUNNING)]
    running = [one for one in states if one.state == RUNNING]
    rows = [*running, *reversed(ended), *(one for one in states if one.state == WAITING)]
    title = f"{len(ended)} of {len(states)} cells, {len(running)} running"
    table = Table("model", "candidate", "dtype", "state", "machine", title=title, title_justify="left")
    for one in rows[:SHOWN]:
        asked = one.asked
        state = Text(one.state, style=COLOURS.get(one.state, ""))
        table.add_row(Text(asked.model), Text(asked.candidate), asked.dtype, state, one.node)
    if len(rows) > SHOWN:
        table.caption = f"and {len(rows) - SHOWN} more"
    return table


@contextmanager
def progress_of_fleet(*, quiet: bool) -> Iterator[Progress]:
    """The listener for this terminal."""
    if quiet or not sys.stderr.isatty():
        with progress_for(quiet=quiet) as lines:
            yield lines
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield _LiveTable(live)
