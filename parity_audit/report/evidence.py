"""The numbers behind a finding, a few lines for a reader; every layer and every number is in report.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity_audit.report.numbers import number, shown

NAMES = {"unexplained": "unexplained", "n": "n", "read_from": "read from", "interval": "between"}
NAMED = 4
"""Names of a list that are shown: a model has a tensor of one kind in each of dozens of layers."""


def evidence_lines(evidence: dict[str, Any]) -> list[str]:
    """Plain facts on one line; of a list of measurements the first, and how many more there are."""
    facts = [
        f"{_name(key)} {_brief(value)}" for key, value in evidence.items() if value is not None and not _is_table(value)
    ]
    lines = [", ".join(facts)] if facts else []
    return lines + [_measured(key, value) for key, value in evidence.items() if _is_table(value)]


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, dict) for item in value)


def _measured(name: str, entries: Sequence[dict[str, Any]]) -> str:
    more = f"; {len(entries) - 1} more in report.json" if len(entries) > 1 else ""
    return f"{name}: {_measurement(entries[0])}{more}"


def _measurement(entry: dict[str, Any]) -> str:
    """`layer 0: 14.9666 +- 2e-06, unexplained 1.1e-06, n 3921, read from attn_scores`."""
    value = shown(entry.get("value"))
    error = f" ± {_brief(entry['stderr'])}" if entry.get("stderr") not in (None, {}) else ""
    known = [f"{NAMES[key]} {_brief(entry[key])}" for key in NAMES if entry.get(key) is not None]
    place = f"layer {entry['layer']}: " if entry.get("layer") is not None else ""
    return place + ", ".join([value + error, *known])


def _name(key: str) -> str:
    return key.replace("_", " ")


def _brief(value: Any) -> str:
    if isinstance(value, (list, tuple)) and len(value) > NAMED + 1 and all(isinstance(item, str) for item in value):
        return f"{', '.join(value[:NAMED])} and {len(value) - NAMED} more in report.json"
    return number(value) if isinstance(value, float) else shown(value)
