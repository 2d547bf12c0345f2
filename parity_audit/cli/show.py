"""Print a finished report in the format asked for."""

from __future__ import annotations

import sys

from parity_audit.core.errors import UsageError
from parity_audit.core.jsonio import dumps
from parity_audit.core.report import Report
from parity_audit.report.markdown import to_markdown
from parity_audit.report.terminal import print_report, verdict_lines

FORMATS = ("terminal", "markdown", "json")


def show(report: Report, format: str, *, quiet: bool = False) -> None:
    """Write to stdout.

    Raises:
        UsageError: not a format.
    """
    if format == "json":
        sys.stdout.write(dumps(report, indent=1) + "\n")
    elif format == "markdown":
        sys.stdout.write(to_markdown(report))
    elif format == "terminal" and quiet:
        sys.stdout.write("\n".join(verdict_lines(report)) + "\n")
    elif format == "terminal":
        print_report(report)
    else:
        raise UsageError(f"`{format}` is not a format", code="unknown-format", expected=", ".join(FORMATS))
