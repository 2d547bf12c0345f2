"""Progress as a value passed down: the stages report, the CLI draws, a notebook hears nothing."""

from __future__ import annotations

from typing import Protocol

RUNS, CAPTURE, REUSE = "runs", "capture", "reuse"
"""Stages: how many runs of all probes are to come (`total`), the beginning of a probe of one, and a run that need not be made."""


class Progress(Protocol):
    """A listener for long work."""

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        """Say what is going on: `stage` is a short stable name, `text` the detail, `done` of `total` if known."""


class Silent:
    """A listener that ignores everything."""

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        """Ignore the news."""


SILENT: Progress = Silent()
