"""Restrict edits to the layers of a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence

from parity_audit.core.types import EVERY, Edit

RELATIVE = ("add", "scale_output")
"""Operations that change the existing value, so that they would spoil a layer that is already right."""
_INDEX = re.compile(r"\[(\d+)\]")


def on_layers(edits: Sequence[Edit], layers: Sequence[int] | None) -> tuple[Edit, ...] | None:
    """Return the edits restricted to these layers (None: all layers); None if no edit is left besides load settings."""
    if layers is None:
        return tuple(edits)
    kept = [part for edit in edits for part in _parts(edit, layers)]
    told = any(edit.op != "load" for edit in kept)
    return tuple(kept) if told else None


def in_every_layer(path: str) -> str:
    """Return a path in one layer with its layer index replaced by the marker for every layer."""
    return _INDEX.sub(EVERY, path, 1)


def _parts(edit: Edit, layers: Sequence[int]) -> list[Edit]:
    if edit.op == "load":
        return [edit]
    if EVERY in edit.path:
        return [Edit(op=edit.op, path=edit.path.replace(EVERY, f"[{n}]", 1), value=_at(edit.value, n)) for n in layers]
    index = _INDEX.search(edit.path)
    return [edit] if index and int(index[1]) in layers else []


def _at(value: object, layer: int) -> object:
    """Return a layer's value: a list holds one value per layer, any other value applies to all."""
    return value[layer] if isinstance(value, list) else value
