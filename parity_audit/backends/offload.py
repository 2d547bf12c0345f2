"""Read and change weights that accelerate keeps in main memory or on disk until their module runs.

Until then the module's own tensors are on the meta device, and the module's hook has the values. The values are read and changed
in the hook, because anything written to the module itself is overwritten when the hook brings the stored values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.core.errors import BackendFailed

HOOK = "_hf_hook"


class _Kept(Mapping[str, Any]):
    """The values that a hook stores, some of them changed, read with torch function modes off.

    Otherwise the judge's mode would turn every float32 dtype into float64, also where the bytes of a weight file are read.
    """

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self.kept = kept
        self.own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        with torch._C.DisableTorchFunction():
            return self.own[name] if name in self.own else self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)


def readable_in_any_mode(root: nn.Module) -> None:
    """Wrap the stored values of every hook of a model, so that it reads them correctly under any torch function mode."""
    for module in root.modules():
        for hook in _hooks(module):
            hook.weights_map = _Kept(hook.weights_map)


def keeps(module: nn.Module) -> bool:
    """Whether the weights of a module are offloaded, so that a hook brings them while the module runs."""
    return any(True for _ in _hooks(module))


def is_offloaded(value: Any) -> bool:
    """Whether a value is a tensor on the meta device, which has no numbers."""
    return isinstance(value, Tensor) and value.is_meta


def brought(holder: Any, name: str, value: Any) -> Any:
    """Return a module's attribute; if it is offloaded, return a copy with its numbers in main memory.

    Args:
        holder: the module.
        name: name of the attribute.
        value: the attribute, which may be on the meta device.

    Raises:
        BackendFailed: it is on the meta device, and no hook of the module has its numbers, or they cannot be read or have
            another shape.
    """
    if not is_offloaded(value):
        return value
    hook = _hook_with(holder, name)
    try:
        kept: Tensor = hook.weights_map[name].detach().to("cpu", value.dtype)
    except (KeyError, OSError, RuntimeError) as error:
        raise BackendFailed(
            f"the offloaded {_said(holder, name)} cannot be read ({error})", code="offloaded-weights"
        ) from error
    if is_offloaded(kept) or kept.shape != value.shape:
        what = "no numbers" if is_offloaded(kept) else f"the shape {list(kept.shape)} and not {list(value.shape)}"
        raise BackendFailed(f"the offloaded {_said(holder, name)} has {what}", code="offloaded-weights")
    return nn.Parameter(kept, requires_grad=False) if isinstance(value, nn.Parameter) else kept


def put(holder: Any, name: str, value: Any) -> bool:
    """Change the value that a hook stores for an attribute; return False, without a change, if it is not offloaded.

    Raises:
        BackendFailed: it is on the meta device, and no hook of the module has its numbers.
    """
    if not is_offloaded(getattr(holder, name, None)):
        return False
    hook = _hook_with(holder, name)
    if not isinstance(hook.weights_map, _Kept):
        hook.weights_map = _Kept(hook.weights_map)
    hook.weights_map.own[name] = value.detach()
    return True


def _hook_with(holder: Any, name: str) -> Any:
    hook = next(_hooks(holder), None)
    if hook is None:
        raise BackendFailed(
            f"{_said(holder, name)} is on the meta device, without numbers, and its module has no hook that brings them",
            code="offloaded-weights",
        )
    return hook


def _hooks(holder: Any) -> Iterator[Any]:
    """Yield the hooks of a module that bring its weights. Several hooks of one module are stored in one hook's `hooks`."""
    hook = getattr(holder, HOOK, None)
    for each in (hook, *getattr(hook, "hooks", ())):
        if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None:
            yield each


def _said(holder: Any, name: str) -> str:
    return f"`{name}` of a {type(holder).__name__}"
