"""Print a finished report in the format asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli.errors import guarded
from parity_audit.core.choices import require_choice
from parity_audit.core.logprob_report import LogprobReport
from parity_audit.report.files import read_finished
from parity_audit.report.views import FORMATS as FORMATS
from parity_audit.report.views import Finished, rendered


def require_format(format: str) -> None:
    """Before anything runs.

    Raises:
        UsageError: not a format.
    """
    require_choice(format, FORMATS, what="a format", code="unknown-format")


def show(report: Finished, format: str, *, quiet: bool = False, beside: Path | None = None) -> None:
    """Write to stdout, in a format of `FORMATS`.

    Args:
        beside: the file that the report was read from; else it is where its run wrote it.
    """
    from parity_audit.logprobs.files.writing import read_tokens

    where = str(report.environment.get("report", ""))
    own = beside or Path(where)
    tokens = read_tokens(own.parent) if isinstance(report, LogprobReport) and format == "html" else None
    text = rendered(
        report, format, where=where, tokens=tokens, quiet=quiet, colour=_colour(), ascii_only=not _unicode()
    )  # fmt: skip
    _write(text)


@guarded
def show_file(
    report: Annotated[Path, typer.Argument(help="A report.json, logprobs.json or invariance.json that a run wrote.")],
    format: Annotated[
        str, typer.Option("--format", help="terminal, markdown, html, json, junit or sarif.")
    ] = "terminal",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdicts.")] = False,
) -> int:
    """Print a report of an earlier run in another format; nothing is run, and the exit code is 0 whatever its verdict."""
    require_format(format)
    show(read_finished(report), format, quiet=quiet, beside=report)
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
