"""The names of a text model's tensors in a checkpoint that also holds other modalities.

transformers 4 stored the whole text model under `language_model.`, with its head. Later classes, and live modules of
transformers since 4.52, have the decoder as `model.language_model.` and the head as `lm_head.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of a text model's tensors, each with the prefix in a checkpoint of the text model alone."""
HEAD = "lm_head."


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the given name of every tensor of the text model, by its name in a checkpoint of the text model alone.

    In a checkpoint that holds nothing else, each name maps to itself. Tensors of other modalities are left out.
    """
    names = list(names)
    inside = {
        prefix + name.removeprefix(outer): name
        for name in names
        for outer, prefix in PREFIXES.items()
        if name.startswith(outer)
    }
    if not inside:
        return {name: name for name in names}
    return inside | {name: name for name in names if name.startswith(HEAD)}


def in_whole(path: str, paths: Mapping[str, str]) -> str:
    """Return a path in a text model as a path in the model that contains it; see
    `core.types.Description.text_paths`."""
    for own, whole in paths.items():
        if not own:
            return f"{whole}.{path}"
        if path == own or path.startswith((f"{own}.", f"{own}[")):
            return whole + path.removeprefix(own)
    return path
