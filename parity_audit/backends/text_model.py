"""Present the text model inside a model of several modalities under the module names of a text-only model."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn

from parity_audit.backends.loading import text_config

INSIDE = "language_model"


class TextModel(nn.Module):
    """The decoder and the head of the text model inside a larger model.

    A call runs the whole model, with text alone. Attributes that this object lacks are looked up in the whole model.
    """

    base_model_prefix = "model"

    def __init__(self, whole: Any, decoder: nn.Module, head: nn.Module, paths: dict[str, str]) -> None:
        super().__init__()
        # Not stored as a submodule: the other modalities have no sites and no weights of the text model.
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
    """Return the text model inside a transformers model of several modalities, and any other model unchanged."""
    decoder = getattr(getattr(model, "model", None), INSIDE, None)
    if isinstance(decoder, nn.Module):  # transformers since 4.52
        return TextModel(model, decoder, model.lm_head, {"model": f"model.{INSIDE}"})
    whole: Any = getattr(model, "_modules", {}).get(INSIDE)
    if hasattr(whole, "model") and hasattr(whole, "lm_head"):
        return TextModel(model, whole.model, whole.lm_head, {"": INSIDE})
    return model


def paths_in_whole(model: Any) -> dict[str, str]:
    """Return how the start of a path in the text model maps to the start of the same path in the whole model.

    The result is empty for a model that is no part of another model.
    """
    return model.paths if isinstance(model, TextModel) else {}


def text_part(model: Any) -> Any:
    """Return the text model that is a module of an engine's model of several modalities, any other model unchanged."""
    inside = getattr(model, "_modules", {}).get(INSIDE)
    return inside if any(hasattr(inside, name) for name in ("compute_logits", "logits_processor")) else model


def paths_of_part(model: Any) -> dict[str, str]:
    """Return how the start of a path in `text_part(model)` maps to its start in the engine's model.

    The result is empty if `text_part(model)` is the engine's model itself.
    """
    return {} if text_part(model) is model else {"": INSIDE}
