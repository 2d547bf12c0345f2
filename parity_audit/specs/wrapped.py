"""Multimodal models that contain a text model, such as Gemma3ForConditionalGeneration. Only the text model is audited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_MODEL = "text_config"
OF_THE_WHOLE = (
    "quantization_config",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys of the outer config that also hold for the text model, unless its own config has them."""
WHOLE_DECIDES = ("tie_word_embeddings",)
"""Keys for which the outer config takes precedence over that of the text model, because the head is a module of the whole model."""
OVERRIDES = ("hf_overrides", "json_model_override_args")
"""Settings of engines that replace keys of the checkpoint's config."""
WRAPPED_IN = "_wrapped_in"
"""The key, in the config of a text model, for the `model_type` of the multimodal model that contains it. No config.json has it."""


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config is that of a multimodal model that contains a text model."""
    return isinstance(config.get(TEXT_MODEL), dict)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model inside a multimodal model, as it would be in a config.json of its own.

    The key `WRAPPED_IN` names the `model_type` of the multimodal model. The config of a plain text model is returned
    unchanged.
    """
    if not is_wrapper(config):
        return dict(config)
    inside = {**config[TEXT_MODEL], WRAPPED_IN: config.get("model_type")}
    decided = {key: config[key] for key in WHOLE_DECIDES if config.get(key) is not None}
    return {**{key: config[key] for key in OF_THE_WHOLE if key in config}, **inside, **decided}


def config_for(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the config with which the spec of this architecture is evaluated.

    For a multimodal model it is `text_config`, with `architectures` added because it may name none.
    """
    return {**text_config(config), "architectures": [architecture]} if is_wrapper(config) else dict(config)


def of_the_text_model(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return load settings with their config overrides nested under `text_config` if the model is part of a multimodal one."""
    if not config.get(WRAPPED_IN):
        return dict(settings)
    return {key: {TEXT_MODEL: value} if key in OVERRIDES else value for key, value in settings.items()}
