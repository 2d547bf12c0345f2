"""The three files of a report directory: report.json, report.md and report.txt."""

from __future__ import annotations

import os
from pathlib import Path

from parity_audit.core.errors import NotJudged
from parity_audit.core.report import Report
from parity_audit.report import json, markdown, terminal

JSON_NAME = "report.json"


def write_report(report: Report, folder: Path) -> Path:
    """Write every format below `folder` and return the path of report.json; a file is there whole or not at all.

    Raises:
        NotJudged: the disk is full or read-only.
    """
    path = folder / JSON_NAME
    texts = {
        JSON_NAME: json.dumps(report),
        "report.md": markdown.render(report, where=JSON_NAME),
        "report.txt": terminal.render(report, where=JSON_NAME),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _write(folder / name, text)
    except OSError as error:
        raise NotJudged(
            f"cannot write the report: {error.strerror or error}", code="disk", where=str(folder),
            hint="choose another place with --out",
        ) from error  # fmt: skip
    return path


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
