"""Adapters of PEFT that add to the weight of a layer: what the layer computes with is the sum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity_audit.backends.paths import get

WEIGHT = "weight"


def effective(root: Any, path: str, value: Any) -> Any:
    """A module's weight with the adapters that are switched on; None where they do more to it than add.

    Args:
        path: of the weight, from `root`; anything else is returned as it is.
    """
    module, _, name = path.rpartition(".")
    if name != WEIGHT or not isinstance(value, Tensor):
        return value
    holder = get(root, module)
    if not hasattr(holder, "get_delta_weight") or holder.disable_adapters or holder.merged:
        return value
    active = [adapter for adapter in holder.active_adapters if adapter in getattr(holder, "scaling", {})]
    other = (getattr(holder, "lora_variant", {}), getattr(holder, "use_dora", {}))
    if any(adapter_of.get(adapter) for adapter_of in other for adapter in active):
        return None  # DoRA and its like
    for adapter in active:
        value = value + holder.get_delta_weight(adapter)
    return value
