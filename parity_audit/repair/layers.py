"""Edits kept to the layers of a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence

from parity_audit.core.types import EVERY, Edit

RELATIVE = ("add", "scale_output")
"""Operations that start from what is there: a layer that is right already would be spoilt."""
_INDEX = re.compile(r"\[(\d+)\]")


def on_layers(edits: Sequence[Edit], layers: Sequence[int] | None) -> tuple[Edit, ...] | None:
    """The same edits on these layers only (None: everywhere); None where no edit can be told by layer."""
    if layers is None:
        return tuple(edits)
    kept = [part for edit in edits for part in _parts(edit, layers)]
    told = any(edit.op != "load" for edit in kept)
    return tuple(kept) if told else None


def in_every_layer(path: str) -> str:
    """A path in one layer as it is written for all of them."""
    return _INDEX.sub(EVERY, path, 1)


def _parts(edit: Edit, layers: Sequence[int]) -> list[Edit]:
    if edit.op == "load":
        return [edit]
    if EVERY in edit.path:
        return [Edit(op=edit.op, path=edit.path.replace(EVERY, f"[{n}]", 1), value=_at(edit.value, n)) for n in layers]
    index = _INDEX.search(edit.path)
    return [edit] if index and int(index[1]) in layers else []


def _at(value: object, layer: int) -> object:
    """A list holds one value per layer."""
    return value[layer] if isinstance(value, list) else value
