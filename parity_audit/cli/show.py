"""Print a finished report in the format asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli.errors import guarded
from parity_audit.core.choices import require_choice
from parity_audit.core.gate import GateReport
from parity_audit.core.report import Report
from parity_audit.report import audit_page, json, junit, markdown, sarif, terminal
from parity_audit.report.cases import gate_of
from parity_audit.report.files import read_report
from parity_audit.report.words import headline, label

FORMATS = ("terminal", "markdown", "html", "json", "junit", "sarif")


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
    elif format == "html":
        text = audit_page.render(report)
    elif format == "terminal" and quiet:
        text = "\n".join([headline(report), *(f"{label(item)}: {item.verdict.value}" for item in report.candidates)])
    else:
        text = terminal.render(report, where=where, colour=_colour(), ascii_only=not _unicode())
    _write(text.rstrip("\n") + "\n")


@guarded
def show_file(
    report: Annotated[Path, typer.Argument(help="A report.json that an audit wrote.")],
    format: Annotated[str, typer.Option("--format", help="terminal, markdown, html or json.")] = "terminal",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdicts.")] = False,
) -> int:
    """Print a report of an earlier audit in another format; nothing is run, and the exit code is 0 whatever its verdict."""
    require_format(format)
    show(read_report(report), format, quiet=quiet)
    return 0


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
