"""What was done to the weights of a TransformerLens model, read off the model itself."""

from __future__ import annotations

from typing import Any

import torch

COMPATIBLE = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
"""What `enable_compatibility_mode()` does unless it is told otherwise."""
CENTRED = 1e-4
"""A mean of this share of the mean size is rounding; weights that nobody centred are far from it."""


def of_hooked_transformer(model: Any) -> tuple[str, ...]:
    """Norms without gains, and weights whose mean is gone."""
    found = []
    if model.cfg.normalization_type in ("LNPre", "RMSPre"):
        found.append("fold_ln")
    if _centred(model.W_E, dim=-1):
        found.append("center_writing_weights")
    if _centred(model.W_U, dim=-1):
        found.append("center_unembed")
    if found and all(not bool(block.attn.b_V.any()) for block in model.blocks):
        found.append("fold_value_biases")
    return tuple(found)


def _centred(weight: torch.Tensor, dim: int) -> bool:
    weight = weight.detach()
    size = float(torch.linalg.vector_norm(weight, 1)) / weight.numel()  # an embedding is large: no copy of its size
    return float(weight.mean(dim).abs().mean()) <= CENTRED * size


def of_bridge(model: Any) -> tuple[str, ...]:
    """The compatibility mode's processing, where the mode is on."""
    return COMPATIBLE if getattr(model, "compatibility_mode", False) else ()
