"""Find out from a TransformerLens model itself which weight processing it has gone through."""

from __future__ import annotations

from typing import Any

import torch

COMPATIBLE = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
"""The weight processing that `enable_compatibility_mode()` does by default."""
CENTRED = 1e-4
"""Largest mean of centred weights, relative to their mean absolute value: it is rounding. Other weights have a far larger mean."""


def of_hooked_transformer(model: Any) -> tuple[str, ...]:
    """Return the names of the processing steps that the weights show.

    Norms without gains show `fold_ln`, and weights with zero mean show centering. Zero value biases in all blocks show
    `fold_value_biases`, but only together with another step, because they may be zero without any processing.
    """
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
    # Unlike `abs()`, the norm makes no copy of the weight; an embedding is large.
    size = float(torch.linalg.vector_norm(weight, 1)) / weight.numel()
    return float(weight.mean(dim).abs().mean()) <= CENTRED * size


def of_bridge(model: Any) -> tuple[str, ...]:
    """Return the compatibility mode's default processing if a TransformerBridge has the mode on, else nothing."""
    return COMPATIBLE if getattr(model, "compatibility_mode", False) else ()
