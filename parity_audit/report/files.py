"""The files of a finished audit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from parity_audit.core.errors import NotJudged
from parity_audit.core.jsonio import dumps
from parity_audit.core.report import Report
from parity_audit.report.markdown import to_markdown

REPORT_NAME = "report.json"


def write_report(report: Report, out: Path) -> Report:
    """Write report.json and report.md, each whole or not at all, and return the report with its own place in it.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    report = dataclasses.replace(report, environment={**report.environment, "report": str(out / REPORT_NAME)})
    try:
        for name, text in ((REPORT_NAME, dumps(report, indent=1) + "\n"), ("report.md", to_markdown(report))):
            part = out / f"{name}.part"
            part.write_text(text)
            os.replace(part, out / name)
    except OSError as error:
        raise NotJudged(
            f"cannot write the report: {error.strerror or error}",
            code="disk",
            where=str(out),
            hint="choose another --out",
        ) from error
    return report
