"""The evidence of a finding in a few lines; report.json has every layer and every number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity_audit.report.numbers import number, shown

NAMES = {"unexplained": "unexplained", "n": "n", "read_from": "read from", "interval": "between"}
NAMED = 4
"""How many names of a long list are shown: one kind of tensor may be named once for each of dozens of layers."""


def evidence_lines(evidence: dict[str, Any]) -> list[str]:
    """Return one line of plain facts, then one for each list of measurements: its first entry and the number of others."""
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
    """Describe one measurement: `layer 0: 14.9666 ± 2e-06, unexplained 1.1e-06, n 3921, read from attn_scores`."""
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
