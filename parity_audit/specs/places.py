"""Where a spec file says a constant: the line that a person mends."""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from parity_audit.specs.load import read_yaml


def knob_line(file: Path, knob: str) -> int:
    """The line of a knob in the file itself; where a parent gives it, that of `extends`; else the first.

    Raises:
        SpecError: the file cannot be read.
    """
    data = read_yaml(file)
    knobs = data.get("knobs")
    if isinstance(knobs, CommentedMap) and knob in knobs:
        return int(knobs.lc.key(knob)[0]) + 1
    return int(data.lc.key("extends")[0]) + 1 if "extends" in data else 1


def entry_lines(data: CommentedMap, key: str) -> dict[str, int]:
    """The line of each item of a list, or key of a mapping, that stands under `key`."""
    entries = data.get(key)
    if isinstance(entries, CommentedMap):
        return {str(name): int(entries.lc.key(name)[0]) + 1 for name in entries}
    if isinstance(entries, CommentedSeq):
        return {str(item): int(entries.lc.item(number)[0]) + 1 for number, item in enumerate(entries)}
    return {}
