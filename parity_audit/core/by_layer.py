"""A knob's value that layers do not share, as findings and reports hold it: `{"by_layer": {"0": 8.0, "1": 16.0}}`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parity_audit.core.types import KnobValue

BY_LAYER = "by_layer"


def by_layer(values: Mapping[int | None, KnobValue]) -> dict[str, Any]:
    """The values of these layers as one; keys are text, as in JSON."""
    return {BY_LAYER: {str(layer): value for layer, value in values.items()}}


def each_layer(value: object) -> dict[int, KnobValue] | None:
    """The value of each layer; None of a value that is not by layer."""
    if not isinstance(value, dict) or value.keys() != {BY_LAYER}:
        return None
    return {int(layer): own for layer, own in value[BY_LAYER].items()}


def values_of(value: KnobValue) -> list[KnobValue]:
    """The values of all layers that a value speaks of; itself alone where it is not by layer."""
    found = each_layer(value)
    return [value] if found is None else list(found.values())


def in_layers(value: object, tell: Callable[[Any], str]) -> str:
    """A value by layer in words: `4096 in layers 0, 2; none in layers 1, 3`. `tell` says the value of one layer."""
    groups: dict[str, list[int]] = {}
    for layer, own in (each_layer(value) or {}).items():
        groups.setdefault(tell(own), []).append(layer)
    return "; ".join(f"{said} in {layer_set(layers)}" for said, layers in groups.items())


def layer_set(layers: Sequence[int] | None) -> str:
    """`layers 0-3, 7`; None stands for every layer that has the component."""
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
