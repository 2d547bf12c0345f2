# parity-audit: transformers may be imported before this file
"""Ports of transformers that are right nearly everywhere: each is wrong behind its hooks, or for few inputs only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn


def loaded(model_path: str, dtype: str, device: str) -> Any:
    """The model as transformers has it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, torch_dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.to(device)


def returning(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The model with a `__call__` that changes the logits after every hook has run."""

    class Port(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            out.logits = change(out.logits)
            return out

    model.__class__ = Port
    return model


def embedding(model: Any, change: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """The model with `change(token ids [batch pos], embeddings [batch pos d_model])` in place of its embeddings."""
    inner = model.get_input_embeddings()
    right = inner.forward
    inner.forward = lambda ids: change(ids, right(ids))
    return model


def clean(model_path: str, dtype: str, device: str) -> Any:
    return loaded(model_path, dtype, device)


def clipped(model_path: str, dtype: str, device: str) -> Any:
    return returning(loaded(model_path, dtype, device), lambda logits: logits.clamp(-0.3, 0.3))


def first_position(model_path: str, dtype: str, device: str) -> Any:
    return returning(loaded(model_path, dtype, device), lambda logits: logits[:, :1])


def token_zero(model_path: str, dtype: str, device: str) -> Any:
    return embedding(loaded(model_path, dtype, device), lambda ids, e: torch.where((ids == 0)[..., None], 2 * e, e))


def last_ids(model_path: str, dtype: str, device: str) -> Any:
    model = loaded(model_path, dtype, device)
    late = model.config.vocab_size - 3
    return embedding(model, lambda ids, e: torch.where((ids >= late)[..., None], 2 * e, e))


def leaking(model_path: str, dtype: str, device: str) -> Any:
    return embedding(loaded(model_path, dtype, device), lambda ids, e: e + 0.01 * e.roll(1, 0) if len(ids) >= 8 else e)


def single(model_path: str, dtype: str, device: str) -> Any:
    return embedding(loaded(model_path, dtype, device), lambda ids, e: 1.1 * e if ids.shape[1] == 1 else e)


def remembering(model_path: str, dtype: str, device: str) -> Any:
    """Wrong from the first batch of eight on."""
    seen: list[int] = []

    def change(ids: Tensor, embedded: Tensor) -> Tensor:
        known = any(rows >= 8 for rows in seen)
        seen.append(len(ids))
        return 1.01 * embedded if known else embedded

    return embedding(loaded(model_path, dtype, device), change)
