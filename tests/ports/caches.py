"""transformers models that are right in whole runs, and do not go on from their cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def _model(model_path: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model_path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()


def one_index_twice(model_path: str, dtype: str, device: str) -> Any:
    """Two layers keep their keys and values in one place, as where layers are counted wrongly: the mask does not fit them."""
    model = _model(model_path, dtype)
    model.model.layers[2].self_attn.layer_idx = 1
    return model


def keeps_none(model_path: str, dtype: str, device: str) -> Any:
    """A model that returns no cache when it is asked for one."""
    model = _model(model_path, dtype)
    forward = model.forward

    def without(*args: Any, use_cache: bool = False, **more: Any) -> Any:
        return forward(*args, use_cache=False, **more)

    model.forward = without
    return model
