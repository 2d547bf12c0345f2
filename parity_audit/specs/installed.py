"""What the transformers installed in this interpreter knows of a config. It may be older than an architecture of a spec.

Importing a configuration class takes four to seven seconds, because transformers writes its docstring when it is
imported. The values that a class gives for a config are therefore cached on disk. The cache key is made of the config,
the release and location of transformers, and the source of this module. A class may also be registered while a program
runs: if transformers is already imported, the class that is registered now is used, once per config.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parity_audit.cache.root import cache_root
from parity_audit.cache.texts import keep_text

FOLDER = "config-classes"
ASKED = 128
"""The number of configs whose result a process keeps in memory: an audit needs two or three configs, each about a dozen times."""


@dataclass(frozen=True)
class ConfigClassValues:
    """The values that the configuration class of a model type gives for one config, and the key names that it accepts."""

    values: Mapping[str, Any]
    """Every key of the class with its value for this config; {} if the class rejects the config."""
    names: Mapping[str, str]
    """An alternative name that the class accepts -> the name under which it stores the value."""


def release() -> str:
    """Return the version of the installed transformers."""
    return importlib.metadata.version("transformers")


def configuration_class(config: Mapping[str, Any]) -> Any:
    """Return the configuration class for a config's `model_type`; None if the installed transformers has none."""
    import transformers

    kind = config.get("model_type")
    return transformers.CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING else None


def config_class_values(config: Mapping[str, Any]) -> ConfigClassValues | None:
    """Return the values that transformers' class for this model type gives for a config; None if there is no such class."""
    try:
        written = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError):  # a value that JSON cannot hold, so there is no cache key
        return _asked(config)
    if _is_imported():
        return _of_class(configuration_class(config), written)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ConfigClassValues(**json.loads(_place(written).read_text()))
    return _asked_and_kept(written)


@functools.lru_cache(maxsize=ASKED)
def _of_class(of_kind: Any, written: str) -> ConfigClassValues | None:
    """Return the values that the given class gives for a config.

    The class is part of the cache key, because another class may be registered under the same model type later.
    """
    return _asked_and_kept(written)


def _asked_and_kept(written: str) -> ConfigClassValues | None:
    config = json.loads(written)
    says = _asked(config)
    if says is not None and configuration_class(config).__module__.startswith("transformers."):
        keep_text(_place(written), json.dumps(asdict(says)))
    return says


def lacks(config: Mapping[str, Any]) -> str:
    """Return a message if the installed transformers has no class for this config, else an empty string."""
    if config_class_values(config) is not None:
        return ""
    return f"transformers {release()}, which this interpreter has, knows no model type `{config.get('model_type')}`"


def instead(config: Mapping[str, Any]) -> str:
    """Return the hint that goes with the message of `lacks`."""
    return f"install a transformers that has `{config.get('model_type')}`, or parity-audit in an environment of its own"


def _is_imported() -> bool:
    return "transformers" in sys.modules


def _asked(config: Mapping[str, Any]) -> ConfigClassValues | None:
    import transformers

    of_kind = configuration_class(config)
    if of_kind is None:
        return None
    names = {str(old): str(new) for old, new in of_kind.attribute_map.items()}
    said = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        made = of_kind(**copy.deepcopy({key: value for key, value in config.items() if key != "model_type"}))
        return ConfigClassValues(values=json.loads(made.to_json_string(use_diff=False)), names=names)
    except Exception:  # a class may reject values with any exception; the values themselves are checked elsewhere
        return ConfigClassValues(values={}, names=names)
    finally:
        transformers.logging.set_verbosity(said)


def _place(written: str) -> Path:
    """Return the cache file for a config; its name also depends on the installed transformers and on this module's source."""
    found = importlib.util.find_spec("transformers")
    place = Path(str(found.origin)) if found is not None and found.origin else Path()
    installed = f"{release()}:{place}:{place.stat().st_mtime_ns if place.is_file() else 0}"
    name = hashlib.sha256(f"{installed}:{Path(__file__).read_text()}:{written}".encode()).hexdigest()[:24]
    return cache_root() / FOLDER / f"{name}.json"
