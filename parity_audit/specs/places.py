"""The line numbers of entries in a spec file, for messages that tell the user which line to correct."""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from parity_audit.specs.load import read_yaml


def knob_line(file: Path, knob: str) -> int:
    """Return the line of a knob in a spec file; if the file does not have it, the line of `extends`; without that, 1.

    Raises:
        SpecError: the file cannot be read.
    """
    data = read_yaml(file)
    knobs = data.get("knobs")
    if isinstance(knobs, CommentedMap) and knob in knobs:
        return int(knobs.lc.key(knob)[0]) + 1
    return int(data.lc.key("extends")[0]) + 1 if "extends" in data else 1


def entry_lines(data: CommentedMap, key: str) -> dict[str, int]:
    """Return the line of each item of the list, or each key of the mapping, under `key`; empty if there is neither."""
    entries = data.get(key)
    if isinstance(entries, CommentedMap):
        return {str(name): int(entries.lc.key(name)[0]) + 1 for name in entries}
    if isinstance(entries, CommentedSeq):
        return {str(item): int(entries.lc.item(number)[0]) + 1 for number, item in enumerate(entries)}
    return {}
