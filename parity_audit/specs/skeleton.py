"""The module tree that transformers builds of a config, without numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from parity_audit.core.errors import UsageError


def config_of(values: Mapping[str, Any]) -> Any:
    """A config.json as transformers' class of its model type, made of a copy: transformers writes into the dictionaries that it
    is given."""
    from transformers import AutoConfig

    own = copy.deepcopy({key: value for key, value in values.items() if key != "model_type"})
    return AutoConfig.for_model(str(values.get("model_type")), **own)


def skeleton(config: Mapping[str, Any]) -> nn.Module:
    """The model of a released config.json, on the meta device.

    Raises:
        UsageError: transformers does not know the model type, or refuses a value.
    """
    from transformers import AutoModelForCausalLM

    try:
        made = config_of(config)
        with torch.device("meta"):
            model: nn.Module = cast("Any", AutoModelForCausalLM).from_config(made)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"transformers cannot build model type `{config.get('model_type')}`", code="unknown-architecture",
            found=str(error)[:200], hint="a spec describes architectures that transformers has",
        ) from error  # fmt: skip
    return model
