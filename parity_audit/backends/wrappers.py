"""Get the model out of wrappers for compilation, parallel execution, adapters or tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _traced(wrapper: Any) -> Any:
    """Return the model inside an nnsight wrapper: attribute `_model` up to nnsight 0.4, `_module` in later releases."""
    own = vars(wrapper)
    return own["_model"] if "_model" in own else own["_module"]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "OptimizedModule": lambda wrapper: wrapper._orig_mod,  # torch.compile
    "DataParallel": lambda wrapper: wrapper.module,
    "DistributedDataParallel": lambda wrapper: wrapper.module,
    "PeftModel": lambda wrapper: wrapper.get_base_model(),  # the adapters stay in the layers
    "NNsight": _traced,
    "Envoy": _traced,
}
"""Functions that return the wrapped model, by the name of the wrapper's class or of one of its base classes.

The classes are found by name, so that their libraries need not be installed.
"""
DEEPEST = 8
"""Largest number of nested wrappers that are removed."""
BRIDGE_PART = "._original_component"
"""Text that TransformerBridge adds to the path of every module that it wraps."""


def unwrapped(model: Any) -> Any:
    """Return the innermost model; a model without a wrapper is returned unchanged."""
    for _ in range(DEEPEST):
        names = [parent.__name__ for parent in type(model).__mro__]
        reach = next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
        if reach is None:
            break
        model = reach(model)
    return model
