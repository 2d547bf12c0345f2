"""Progress reporting: stages call a listener that is passed down; the CLI draws it, and a notebook ignores it."""

from __future__ import annotations

from typing import Protocol

RUNS, CAPTURE, REUSE = "runs", "capture", "reuse"
"""Stages: the number of runs of all probes to come (`total`), the start of one probe, and a run that is reused
instead of repeated."""


class Progress(Protocol):
    """A listener for the progress of long work."""

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        """Report progress: `stage` is a short stable name, `text` the detail, `done` of `total` if these are known."""


class Silent:
    """A listener that ignores every report."""

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        """Ignore the report."""


SILENT: Progress = Silent()
