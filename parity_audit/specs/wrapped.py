"""Models that hold a text model beside other modalities, as Gemma3ForConditionalGeneration does. Text alone is audited."""

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
"""Keys that releases write beside the config of the text model and that hold for it, where its own config has none."""
WHOLE_DECIDES = ("tie_word_embeddings",)
"""Of these the value of the whole model is the one in force: the head is a module of the whole."""
OVERRIDES = ("hf_overrides", "json_model_override_args")
"""Settings of engines that replace keys of the checkpoint's config."""
WRAPPED_IN = "_wrapped_in"
"""The key under which the config of a text model says what it was taken out of; no config.json has it."""


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a model with a text model inside."""
    return isinstance(config.get(TEXT_MODEL), dict)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model inside, as it would stand in a config.json of its own, and what it was taken out of.

    That of a text model comes back as it is.
    """
    if not is_wrapper(config):
        return dict(config)
    inside = {**config[TEXT_MODEL], WRAPPED_IN: config.get("model_type")}
    decided = {key: config[key] for key in WHOLE_DECIDES if config.get(key) is not None}
    return {**{key: config[key] for key in OF_THE_WHOLE if key in config}, **inside, **decided}


def config_for(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The config that the spec of this architecture is read with: `text_config`, which may name no architecture of its own."""
    return {**text_config(config), "architectures": [architecture]} if is_wrapper(config) else dict(config)


def of_the_text_model(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that override keys of a config, said of the text model where `config` was taken out of a larger one."""
    if not config.get(WRAPPED_IN):
        return dict(settings)
    return {key: {TEXT_MODEL: value} if key in OVERRIDES else value for key, value in settings.items()}
