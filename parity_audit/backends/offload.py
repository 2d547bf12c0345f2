"""Weights that accelerate keeps in main memory or on disk until their module runs: until then they are on the meta device.

The module's own hook has their values. They are read and changed there, because what is written to the module itself is lost
when its hook brings the kept values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.core.errors import BackendFailed

HOOK = "_hf_hook"


class _Kept(Mapping[str, Any]):
    """The values that a hook keeps, some of them changed, read past the modes under which the model runs.

    The judge's mode makes float64 of every float32, the bytes of a file among them.
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
    """Let every hook of a model read what it keeps whatever mode the model runs under."""
    for module in root.modules():
        for hook in _hooks(module):
            hook.weights_map = _Kept(hook.weights_map)


def keeps(module: nn.Module) -> bool:
    """Whether a hook brings the weights of a module while it runs."""
    return any(True for _ in _hooks(module))


def is_away(value: Any) -> bool:
    """Whether a tensor's numbers are not where the tensor is."""
    return isinstance(value, Tensor) and value.is_meta


def brought(holder: Any, name: str, value: Any) -> Any:
    """A module's attribute with its numbers, in main memory where it is kept elsewhere.

    Raises:
        BackendFailed: it is on the meta device, and no hook of the module has its numbers, or they cannot be read.
    """
    if not is_away(value):
        return value
    hook = _hook_with(holder, name)
    try:
        kept: Tensor = hook.weights_map[name].detach().to("cpu", value.dtype)
    except (KeyError, OSError, RuntimeError) as error:
        raise BackendFailed(
            f"the offloaded {_said(holder, name)} cannot be read ({error})", code="offloaded-weights"
        ) from error
    if is_away(kept) or kept.shape != value.shape:
        what = "no numbers" if is_away(kept) else f"the shape {list(kept.shape)} and not {list(value.shape)}"
        raise BackendFailed(f"the offloaded {_said(holder, name)} has {what}", code="offloaded-weights")
    return nn.Parameter(kept, requires_grad=False) if isinstance(value, nn.Parameter) else kept


def put(holder: Any, name: str, value: Any) -> bool:
    """Change what a hook keeps of an attribute; False where the attribute is not kept elsewhere.

    Raises:
        BackendFailed: it is on the meta device, and no hook of the module has its numbers.
    """
    if not is_away(getattr(holder, name, None)):
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
    """The hooks of a module that bring its weights; several hooks of one module are one with `hooks`."""
    hook = getattr(holder, HOOK, None)
    for each in (hook, *getattr(hook, "hooks", ())):
        if getattr(each, "offload", False) and getattr(each, "weights_map", None) is not None:
            yield each


def _said(holder: Any, name: str) -> str:
    return f"`{name}` of a {type(holder).__name__}"
