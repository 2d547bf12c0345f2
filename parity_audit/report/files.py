"""The files of a finished audit."""

from __future__ import annotations

import os
from pathlib import Path

from parity_audit.core.errors import NotJudged
from parity_audit.core.jsonio import dumps
from parity_audit.core.report import Report

REPORT_NAME = "report.json"


def write_report(report: Report, out: Path) -> Report:
    """Write report.json whole or not at all, and return the report.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    text = dumps(report, indent=1)
    part = out / f"{REPORT_NAME}.part"
    try:
        part.write_text(text + "\n")
        os.replace(part, out / REPORT_NAME)
    except OSError as error:
        raise NotJudged(
            f"cannot write the report: {error.strerror or error}", code="disk", where=str(out), hint="choose another --out"
        ) from error
    return report
