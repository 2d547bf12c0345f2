"""Output in a notebook: a report as HTML, and the progress of a call as a bar that one line replaces at the end."""

from __future__ import annotations

import functools
import html
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TypeVar

from parity_audit.core.progress import SILENT, Progress
from parity_audit.core.report import shown_in_notebooks_by
from parity_audit.report.html import render
from parity_audit.report.numbers import seconds

Function = TypeVar("Function", bound=Callable[..., Any])
shown_in_notebooks_by(render)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; nothing is imported for this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def listening(given: Progress | None) -> Iterator[Progress]:
    """Provide the given listener; if there is none, a bar in a notebook and a silent listener elsewhere.

    In a notebook all other output of the block is suppressed.
    """
    if not in_notebook():
        yield given or SILENT
    elif given is not None:
        with _quiet():
            yield given
    else:
        bar = NotebookBar()
        try:
            with _quiet():
                yield bar
        finally:
            bar.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress prints and warnings in the block: libraries produce them on import (tqdm asks for widgets).

    Everything that matters is in the report and its logs.
    """
    sink = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(sink), redirect_stderr(sink):
        warnings.simplefilter("ignore")
        yield


def with_bar(function: Function) -> Function:
    """Wrap a function that has an argument `progress`: in a notebook it draws a bar if the caller passes no `progress`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with listening(kwargs.pop("progress", None)) as progress:
            return function(*args, **kwargs, progress=progress)

    return call  # type: ignore[return-value]


class NotebookBar:
    """A progress bar in the output of a cell."""

    def __init__(self) -> None:
        from IPython.display import display

        self.started = time.perf_counter()
        self.handle: Any = display(_Shown("starting"), display_id=True)

    def update(self, stage: str, text: str = "", done: int | None = None, total: int | None = None) -> None:
        """Draw the current stage, with the share `done` of `total` if both are known."""
        share = done / total if done is not None and total else None
        self.handle.update(_Shown(f"{stage}  {text}".strip(), share))

    def close(self) -> None:
        """Replace the bar by the time since the start."""
        self.handle.update(_Shown(f"parity-audit: {seconds(time.perf_counter() - self.started)}", over=True))


class _Shown:
    """One state of the bar, as text and as HTML."""

    def __init__(self, text: str, share: float | None = None, *, over: bool = False) -> None:
        self.text, self.share, self.over = text, share, over

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        value = "" if self.share is None else f' value="{self.share:.3f}"'
        bar = "" if self.over else f"<progress{value}></progress> "
        return f"<small>{bar}{html.escape(self.text)}</small>"
