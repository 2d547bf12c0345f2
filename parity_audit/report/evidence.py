"""The numbers behind a finding, one line each; lists are cut after a few entries, the rest is in report.json."""

from __future__ import annotations

from typing import Any

from parity_audit.report.numbers import shown

ENTRIES = 2


def evidence_lines(evidence: dict[str, Any]) -> list[str]:
    """Scalars on one line, each list of measurements below its name."""
    simple = {key: value for key, value in evidence.items() if not _is_table(value) and value is not None}
    lines = [", ".join(f"{key} {shown(value)}" for key, value in simple.items())] if simple else []
    for key, value in evidence.items():
        if _is_table(value):
            lines += _table_lines(key, value)
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, dict) for item in value)


def _table_lines(name: str, entries: list[dict[str, Any]]) -> list[str]:
    lines = [f"{name}: {_measurement(entry)}" for entry in entries[:ENTRIES]]
    left = len(entries) - len(lines)
    return [*lines, f"{name}: {left} more in report.json"] if left > 0 else lines


def _measurement(entry: dict[str, Any]) -> str:
    rest = {key: value for key, value in entry.items() if key != "layer" and value is not None}
    body = ", ".join(f"{key} {shown(value)}" for key, value in rest.items())
    return body if entry.get("layer") is None else f"layer {entry['layer']}, {body}"
