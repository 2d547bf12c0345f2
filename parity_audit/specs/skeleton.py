"""Build the module tree that transformers makes from a config, without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from parity_audit.core.errors import UsageError


def config_of(values: Mapping[str, Any]) -> Any:
    """Return a config.json as an object of transformers' configuration class.

    It is built from a copy, because transformers modifies the dictionaries that it is given.
    """
    from transformers import AutoConfig

    own = copy.deepcopy({key: value for key, value in values.items() if key != "model_type"})
    return AutoConfig.for_model(str(values.get("model_type")), **own)


def skeleton(config: Mapping[str, Any]) -> nn.Module:
    """Return the model for a released config.json, on the meta device.

    Raises:
        UsageError: transformers does not know the model type, or rejects a value.
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
