"""The model inside what wraps it: compiled, parallel, with adapters, or traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _traced(wrapper: Any) -> Any:
    """nnsight holds the model as `_model` up to 0.4, as `_module` since."""
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
"""How to reach the model, by the name of a wrapper's class or of one of its bases. The libraries need not be installed."""
DEEPEST = 8
BRIDGE_PART = "._original_component"
"""What TransformerBridge adds to the path of every module that it wraps."""


def unwrapped(model: Any) -> Any:
    """The innermost model; a model that nothing wraps is returned as it is."""
    for _ in range(DEEPEST):
        names = [parent.__name__ for parent in type(model).__mro__]
        reach = next((WRAPPERS[name] for name in names if name in WRAPPERS), None)
        if reach is None:
            break
        model = reach(model)
    return model
