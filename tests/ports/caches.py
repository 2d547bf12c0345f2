# parity-audit: transformers may be imported before this file
"""transformers models that are right in whole runs, and do not go on from their cache."""

from __future__ import annotations

from collections.abc import Callable
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


def positions_count_padding(model_path: str, dtype: str, device: str) -> Any:
    """Decoded tokens stand where the cache ends, padding counted."""

    def step(given: dict[str, Any], cache: Any) -> None:
        rows, new = given["input_ids"].shape
        start = cache.get_seq_length()
        given["position_ids"] = torch.arange(start, start + new).expand(rows, -1)

    return _changed_behind_the_prompt(model_path, dtype, step)


def steps_of_several_see_ahead(model_path: str, dtype: str, device: str) -> Any:
    """Tokens that go on from the cache together see each other whole."""

    def step(given: dict[str, Any], cache: Any) -> None:
        rows, new = given["input_ids"].shape
        if new > 1:
            given["attention_mask"] = torch.zeros(rows, 1, new, cache.get_seq_length() + new)

    return _changed_behind_the_prompt(model_path, dtype, step)


def rows_exchanged(model_path: str, dtype: str, device: str) -> Any:
    """Behind the prompt, the cache of a batch is in another order than its rows."""

    def step(given: dict[str, Any], cache: Any) -> None:
        if not hasattr(cache, "exchanged"):
            cache.batch_select_indices(torch.arange(given["input_ids"].shape[0]).roll(-1))
            cache.exchanged = True

    return _changed_behind_the_prompt(model_path, dtype, step)


def _changed_behind_the_prompt(model_path: str, dtype: str, step: Callable[[dict[str, Any], Any], None]) -> Any:
    """A model whose call is changed where it goes on from a cache."""
    model = _model(model_path, dtype)
    forward = model.forward

    def changed(*args: Any, **given: Any) -> Any:
        cache = given.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            step(given, cache)
        return forward(*args, **given)

    model.forward = changed
    return model
