"""Tensors of a checkpoint by their role in the decoder, which `core.types.WeightTap` describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from einops import rearrange
from safetensors import safe_open
from torch import Tensor

from parity_audit.core.text_names import text_names
from parity_audit.core.types import WeightTap

Stored = Callable[[str], Tensor | None]


def laid_out(value: Tensor, tap: WeightTap) -> Tensor:
    """Return the part of a stored tensor that a tap names, in the tap's layout; the tap's scale and shift are not applied."""
    for span, pattern in ((tap.slice, tap.layout), (tap.part, tap.relayout)):
        value = value if span is None else value[slice(*span)]
        if pattern:
            axes = set(pattern.replace("(", " ").replace(")", " ").split())
            value = rearrange(value, pattern, **{axis: size for axis, size in tap.sizes.items() if axis in axes})
    return value


class CheckpointTensors:
    """The tensors of a safetensors checkpoint by name, read when asked for; the files stay open, and no tensor is kept.

    If the checkpoint also has other modalities, the tensors of its text model have the names of the text model alone
    (`core.text_names`).
    """

    def __init__(self, folder: Path) -> None:
        holders: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors"), reverse=True):
            handle: Any = safe_open(file, framework="pt")
            holders |= dict.fromkeys(handle.keys(), handle)
        self._held = {name: (holders[stored], stored) for name, stored in text_names(holders).items()}

    def __call__(self, name: str) -> Tensor | None:
        """Return the tensor of this name, or None if no file holds it."""
        if name not in self._held:
            return None
        holder, stored = self._held[name]
        tensor: Tensor = holder.get_tensor(stored)
        return tensor

    def numbers(self) -> int:
        """Return how many numbers the checkpoint holds."""
        return sum(math.prod(holder.get_slice(name).get_shape()) for holder, name in self._held.values())


def role_tensor(stored: Stored, roles: Mapping[str, WeightTap], role: str, *, tied: bool) -> Tensor | None:
    """Return the tensor of a role, or None; if embeddings are tied, an unembedding that is not stored is the embedding."""
    tap = roles.get(role)
    value = None if tap is None else stored(tap.path)
    if tap is not None and value is not None:
        return laid_out(value, tap)
    return role_tensor(stored, roles, "embed", tied=False) if tied and role == "unembed" else None


WRITES = {
    "embed": ("embed", -1), "pos_embed": ("pos_embed", -1), "attn.o": ("attn_proj", 0), "mlp.down": ("mlp_proj", 0),
    "unembed": ("logits", 0),
}  # fmt: skip
"""The roles of tensors that write to the stream or the logits: the site that each computes, and the axis of its outputs."""


def centred_as(role: str, value: Tensor | None, sites: Collection[str]) -> Tensor | None:
    """Return the tensor of a role or of its bias, minus its mean over the outputs if it computes one of the centred `sites`."""
    site, axis = WRITES.get(role.removesuffix(".bias"), ("", 0))
    if value is None or site not in sites:
        return value
    exact = value.double()
    return exact - exact.mean(axis, keepdim=True)
