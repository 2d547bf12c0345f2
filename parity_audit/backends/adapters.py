"""PEFT adapters that add to the weight of a layer: the layer computes with the sum of its weight and the adapters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parity_audit.backends.paths import get

WEIGHT = "weight"


def weight_with_adapters(root: Any, path: str, value: Any) -> Any:
    """Return a module's weight plus its active adapters, or None if an active adapter does more than add to the weight.

    A value that is not a weight is returned unchanged. So is the weight of a module that has no adapters, or whose adapters are
    disabled or already merged into it.

    Args:
        root: the model.
        path: path of `value`, from `root`.
        value: the tensor that the module holds at `path`.
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
        return None  # for example DoRA, which also rescales the weight
    for adapter in active:
        value = value + holder.get_delta_weight(adapter)
    return value
