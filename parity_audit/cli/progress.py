"""Progress on stderr: a live line on a terminal, one plain line per stage in a pipe, nothing when quiet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from parity_audit.cli.forecast import Forecast
from parity_audit.core.progress import SILENT, Progress
from parity_audit.report.numbers import seconds


class _Live:
    """A spinner with the current stage, and during runs after the first how long they will still take."""

    def __init__(self, console: Console) -> None:
        self.status = console.status("starting")
        self.forecast = Forecast()

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        count = f" [{done + 1}/{total}]" if done is not None and total else ""
        left = self.forecast.seconds_left(stage, done, total)
        rest = "" if left is None else f"  about {seconds(left)} of runs left"
        self.status.update(escape(f"{stage}{count}  {text}{rest}"))


class _Lines:
    """One line whenever the stage or the side changes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last = ""

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        line = f"{stage}: {text.partition(':')[0]}"
        if line != self.last:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self.last = line


@contextmanager
def progress_for(*, quiet: bool) -> Iterator[Progress]:
    """The listener for this terminal."""
    console = Console(stderr=True)
    if quiet:
        yield SILENT
    elif sys.stderr.isatty():
        live = _Live(console)
        with live.status:
            yield live
    else:
        yield _Lines(console)
