"""Convert a Report to the text of report.json, field by field, and back."""

from __future__ import annotations

import json

from parity_audit.core.jsonio import dumps as plain_dumps
from parity_audit.core.jsonio import from_plain
from parity_audit.core.report import SCHEMA_VERSION, Report


def dumps(report: Report) -> str:
    """Return the text of report.json.

    Raises:
        ValueError: a value is NaN or infinite; a report must count such numbers, not contain them.
    """
    return plain_dumps(report, indent=1) + "\n"


def loads(text: str) -> Report:
    """Return the Report that the text of report.json describes.

    Raises:
        ValueError: the text is not JSON, or has the schema version of another release.
        TypeError: a field is missing or unknown.
    """
    value = json.loads(text)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {version!r}, this release reads {SCHEMA_VERSION}")
    return from_plain(Report, value)
