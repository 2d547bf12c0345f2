"""What the commands beside `audit` write on stdout: JSON, one line, or the whole report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity_audit.report.blocks import Block


def write_answer(
    report: Any,
    *,
    headline: Callable[[Any], str],
    content: Callable[..., list[Block]],
    json: bool,
    quiet: bool,
    width: int,
) -> int:
    """Write a finished report and return its exit code.

    Args:
        report: of log-probabilities or of invariance; `environment["report"]` says where its files are.
        headline: its verdict in one line, for `quiet`.
        content: the whole of it for the terminal, given where the files are; `width` in columns.
    """
    from parity_audit.core.jsonio import dumps
    from parity_audit.report.terminal import printed

    if json:
        sys.stdout.write(dumps(report, indent=1) + "\n")
    elif quiet:
        sys.stdout.write(headline(report) + "\n")
    else:
        where = str(getattr(report, "environment", {}).get("report", ""))
        sys.stdout.write(printed(content(report, where=where), width=width, colour=sys.stdout.isatty()))
    return int(report.exit_code)
