"""What the transformers of this interpreter knows. It may be older than an architecture that a spec describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def release() -> str:
    """Its version."""
    import transformers

    return str(transformers.__version__)


def configuration_class(config: Mapping[str, Any]) -> Any:
    """The configuration class of a config's `model_type`, None where this transformers has none."""
    import transformers

    kind = config.get("model_type")
    return transformers.CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING else None


def lacks(config: Mapping[str, Any]) -> str:
    """A sentence that says so where there is no class for a config, "" where there is one."""
    if configuration_class(config) is not None:
        return ""
    return f"transformers {release()}, which this interpreter has, knows no model type `{config.get('model_type')}`"


def instead(config: Mapping[str, Any]) -> str:
    """What to do about it: a hint."""
    return f"install a transformers that has `{config.get('model_type')}`, or parity-audit in an environment of its own"
