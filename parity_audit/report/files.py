"""The files of a report directory: report.json, and the same as Markdown, text and one HTML page."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from parity_audit.core.errors import EXIT_USAGE, Interrupted, NotJudged, UsageError, explained
from parity_audit.core.report import Report
from parity_audit.report import audit_page, json, markdown, terminal
from parity_audit.report.failure import failed_report

JSON_NAME = "report.json"
RENDERERS: dict[str, Callable[[Report], str]] = {
    JSON_NAME: json.dumps,
    "report.md": partial(markdown.render, where=JSON_NAME),
    "report.txt": partial(terminal.render, where=JSON_NAME),
    "report.html": audit_page.render,
}


def write_report(report: Report, folder: Path) -> Path:
    """Write every format below `folder` and return the path of report.json; a file is there whole or not at all.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    path = folder / JSON_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, render in RENDERERS.items():
            _write(folder / name, render(report))
    except OSError as error:
        raise NotJudged(
            f"cannot write the report: {error.strerror or error}", code="disk", where=str(folder),
            hint="choose another place with --out",
        ) from error  # fmt: skip
    return path


def read_report(path: Path) -> Report:
    """A report of an earlier audit.

    Raises:
        UsageError: there is none, or it is of another release or no report at all.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"not a report: {why}",
            code="bad-report",
            where=str(path),
            hint="give a report.json that an audit of this release wrote",
        ) from error


def set_aside(folder: Path) -> None:
    """Rename the report of an earlier run (`report.json` to `previous-report.json`): it must not stand for this one.

    Raises:
        NotJudged: it cannot be renamed.
    """
    try:
        for name in RENDERERS:
            if (folder / name).is_file():
                os.replace(folder / name, folder / f"previous-{name}")
    except OSError as error:
        raise NotJudged(
            f"an earlier report cannot be set aside: {error.strerror or error}", code="disk", where=str(folder),
            hint="choose another place with --out",
        ) from error  # fmt: skip


@contextlib.contextmanager
def failure_reported(model: str, folder: Path | None) -> Iterator[None]:
    """Write what ends a run as its report too, where there is a folder; a malformed question leaves nothing behind."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        known = explained(error) if isinstance(error, Exception) else Interrupted("interrupted: nothing was judged")
        if folder is not None and known.exit_code != EXIT_USAGE:
            with contextlib.suppress(NotJudged):
                write_report(failed_report(model, known), folder)
        raise


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
