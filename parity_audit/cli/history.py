"""`parity-audit history`: a folder of reports as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from parity_audit.cli.errors import guarded

WIDTH = 140
"""Model, candidate, release, verdict and three figures stand side by side."""


@guarded
def history(
    folder: Annotated[Path, typer.Argument(help="Directory with reports, at any depth.")],
    json: Annotated[bool, typer.Option("--json", help="The series as JSON on stdout, nothing else.")] = False,
) -> int:
    """List every candidate of every report below a directory, oldest first, with the ratio to the one before."""
    from parity_audit.core.jsonio import dumps
    from parity_audit.offline.history import history as entries_of
    from parity_audit.report.history_content import history_content
    from parity_audit.report.terminal import printed

    entries = entries_of(folder)
    text = dumps(entries, indent=1) + "\n" if json else printed(history_content(entries), width=WIDTH)
    sys.stdout.write(text)
    return 0
