"""report.json: the Report, field by field, and back."""

from __future__ import annotations

import json

from parity_audit.core.jsonio import dumps as plain_dumps
from parity_audit.core.jsonio import from_plain
from parity_audit.core.report import SCHEMA_VERSION, Report


def dumps(report: Report) -> str:
    """The text of report.json.

    Raises:
        ValueError: a value is NaN or infinite; such a number must be counted, not written.
    """
    return plain_dumps(report, indent=1) + "\n"


def loads(text: str) -> Report:
    """A Report from the text of report.json.

    Raises:
        ValueError: not JSON, or a schema version of another release.
        TypeError: a field is missing or unknown.
    """
    value = json.loads(text)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {version!r}, this release reads {SCHEMA_VERSION}")
    return from_plain(Report, value)
