"""Spec sections with `like: OTHER`: two engines with the same module tree share one map of sites and weights.

Sites, weights, live values and edits of the other section also hold for this one, unless this one gives its own. Notes
and known errors are not taken over. Load settings are renamed to the names that this engine uses (`renamed`). If the
other section is that of transformers, whose modules this engine runs, its variants are taken over too; their versions
then refer to the release of transformers that the engine uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from parity_audit.specs.schema import BENEATH

SHARED = ("sites", "not_visible", "weights", "other_weights", "knobs")
OWN_OF_A_KNOB = ("note",)
RUN_BY_OTHERS = ("hf",)
"""Backends whose modules other engines run."""

Merge = Callable[[Any, Any], Any]


def with_likenesses(data: CommentedMap, merge: Merge) -> CommentedMap:
    """Return the spec with every `like` section written out in full.

    A section without `like`, or with the name of an unknown section, is not changed.
    """
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
    """Return the part of a section that another engine takes over; with `beneath`, its variants as well."""
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
