"""A knob's value that layers do not share, as findings and reports hold it: `{"by_layer": {"0": 8.0, "1": 16.0}}`."""

from __future__ import annotations

from collections.abc import Mapping
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
