"""A knob's value that differs between layers, as findings and reports hold it: `{"by_layer": {"0": 8.0, "1":
16.0}}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parity_audit.core.types import KnobValue

BY_LAYER = "by_layer"


def by_layer(values: Mapping[int | None, KnobValue]) -> dict[str, Any]:
    """Return the values of these layers as one value by layer; keys are text, as in JSON."""
    return {BY_LAYER: {str(layer): value for layer, value in values.items()}}


def each_layer(value: object) -> dict[int, KnobValue] | None:
    """Return the value of each layer; None if the value is not one by layer."""
    if not isinstance(value, dict) or value.keys() != {BY_LAYER}:
        return None
    return {int(layer): own for layer, own in value[BY_LAYER].items()}


def values_of(value: KnobValue) -> list[KnobValue]:
    """Return the values of all layers in a value by layer, or a list with the value itself if it is not one by
    layer."""
    found = each_layer(value)
    return [value] if found is None else list(found.values())


def in_layers(value: object, tell: Callable[[Any], str]) -> str:
    """Return a value by layer in words: `4096 in layers 0, 2; none in layers 1, 3`. `tell` puts the value of one
    layer into words."""
    groups: dict[str, list[int]] = {}
    for layer, own in (each_layer(value) or {}).items():
        groups.setdefault(tell(own), []).append(layer)
    return "; ".join(f"{said} in {layer_set(layers)}" for said, layers in groups.items())


def layer_set(layers: Sequence[int] | None) -> str:
    """Return layers in words: `layers 0-3, 7`, or `everywhere` for None, which means every layer that has the
    component."""
    if layers is None:
        return "everywhere"
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {text}"
