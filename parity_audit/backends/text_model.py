"""The text model inside a transformers model of several modalities, seen under the names that it has on its own."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn

from parity_audit.backends.loading import text_config

INSIDE = "language_model"


class TextModel(nn.Module):
    """The decoder and the head of a text model; a call of it is a call of the whole model, which is given text alone.

    What it has no attribute for is the whole model's.
    """

    base_model_prefix = "model"

    def __init__(self, whole: Any, decoder: nn.Module, head: nn.Module, paths: dict[str, str]) -> None:
        super().__init__()
        # Not as a submodule: other modalities show no site and hold no weight of the text model.
        self.__dict__["whole"] = whole
        self.config, self.paths = text_config(whole.config), paths
        self.model, self.lm_head = decoder, head
        self.forward = wraps(whole.forward)(lambda *args, **kwargs: whole(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["whole"], name)


def text_model(model: Any) -> Any:
    """The text model inside, where there is one; any other model as it is."""
    decoder = getattr(getattr(model, "model", None), INSIDE, None)
    if isinstance(decoder, nn.Module):  # transformers since 4.52
        return TextModel(model, decoder, model.lm_head, {"model": f"model.{INSIDE}"})
    whole: Any = getattr(model, "_modules", {}).get(INSIDE)
    if hasattr(whole, "model") and hasattr(whole, "lm_head"):
        return TextModel(model, whole.model, whole.lm_head, {"": INSIDE})
    return model


def paths_in_whole(model: Any) -> dict[str, str]:
    """How paths in a text model begin, and how they do in the model that it is a part of; none of a model that is no part."""
    return model.paths if isinstance(model, TextModel) else {}


def text_part(model: Any) -> Any:
    """The text model inside an engine's own model of several modalities, a module of its own there; any other model as it is."""
    inside = getattr(model, "_modules", {}).get(INSIDE)
    return inside if any(hasattr(inside, name) for name in ("compute_logits", "logits_processor")) else model


def paths_of_part(model: Any) -> dict[str, str]:
    """How paths in `text_part(model)` begin in the engine's model; empty where that is the whole of it."""
    return {} if text_part(model) is model else {"": INSIDE}
