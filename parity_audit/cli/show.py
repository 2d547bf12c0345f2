"""Print a finished report in the format asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from parity_audit.core.choices import require_choice
from parity_audit.core.gate import GateReport
from parity_audit.core.report import Report
from parity_audit.report import json, junit, markdown, sarif, terminal
from parity_audit.report.cases import gate_of
from parity_audit.report.words import headline, label

FORMATS = ("terminal", "markdown", "json", "junit", "sarif")


OF_CASES: dict[str, Callable[[GateReport], str]] = {"junit": junit.render, "sarif": sarif.render}


def require_format(format: str) -> None:
    """Before anything runs.

    Raises:
        UsageError: not a format.
    """
    require_choice(format, FORMATS, what="a format", code="unknown-format")


def show(report: Report, format: str, *, quiet: bool = False) -> None:
    """Write to stdout, in a format of `FORMATS`."""
    where = str(report.environment.get("report", ""))
    if format == "json":
        text = json.dumps(report)
    elif format == "markdown":
        text = markdown.render(report, where=where)
    elif format in OF_CASES:
        text = OF_CASES[format](gate_of(report))
    elif format == "terminal" and quiet:
        text = "\n".join([headline(report), *(f"{label(item)}: {item.verdict.value}" for item in report.candidates)])
    else:
        text = terminal.render(report, where=where, colour=_colour(), ascii_only=not _unicode())
    _write(text.rstrip("\n") + "\n")


def _write(text: str) -> None:
    """To stdout; a reader that has seen enough (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
