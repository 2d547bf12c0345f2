"""Sections of a spec that say `like: OTHER`: two engines with one module tree share one map of sites and weights.

What the other section says of sites, weights, live values and edits holds here too wherever this one says nothing. Its notes
and known errors are its own, and its load settings get the names that this engine has for them (`renamed`). What it says of some
releases of transformers holds for an engine that runs the modules of transformers by the release beneath it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from parity_audit.specs.schema import BENEATH

SHARED = ("sites", "not_visible", "weights", "other_weights", "knobs")
OWN_OF_A_KNOB = ("note",)
RUN_BY_OTHERS = ("hf",)
"""Sections whose modules other engines run."""

Merge = Callable[[Any, Any], Any]


def with_likenesses(data: CommentedMap, merge: Merge) -> CommentedMap:
    """The spec with every such section written out; sections that name none, or an unknown one, are left as they are."""
    sections = data.get("backends") or {}
    if not any(isinstance(section, Mapping) and section.get("like") in sections for section in sections.values()):
        return data
    full = CommentedMap(sections)
    for name, section in sections.items():
        base = sections.get(section.get("like")) if isinstance(section, Mapping) else None
        if base is not None:
            full[name] = merge(_shared(base, section.get("renamed") or {}, section["like"] in RUN_BY_OTHERS), section)
    out = CommentedMap(data)
    out["backends"] = full
    return out


def _shared(base: Mapping[str, Any], renamed: Mapping[str, str], beneath: bool = False) -> CommentedMap:
    """What another engine takes over from a section."""
    out = CommentedMap({key: value for key, value in base.items() if key in SHARED})
    knobs = {knob: _knob(entry, renamed) for knob, entry in (out.get("knobs") or {}).items()}
    variants = [
        CommentedMap({**_shared(variant, renamed), "versions": f"{BENEATH}{variant['versions']}"})
        for variant in (base.get("variants") or [] if beneath else [])
    ]
    out["knobs"] = CommentedMap(knobs)
    return CommentedMap({**out, "variants": CommentedSeq(variants)}) if variants else out


def _knob(entry: Any, renamed: Mapping[str, str]) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    out = CommentedMap({key: value for key, value in entry.items() if key not in OWN_OF_A_KNOB})
    if out.get("edits"):
        out["edits"] = CommentedSeq([_edit(edit, renamed) for edit in out["edits"]])
    return out


def _edit(edit: Mapping[str, Any], renamed: Mapping[str, str]) -> Any:
    if edit.get("op") != "load" or not isinstance(edit.get("value"), Mapping):
        return edit
    value = CommentedMap({renamed.get(key, key): given for key, given in edit["value"].items()})
    return CommentedMap({**edit, "value": value})
