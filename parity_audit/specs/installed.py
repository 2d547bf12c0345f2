"""What the transformers of this interpreter knows. It may be older than an architecture that a spec describes.

Importing a configuration class takes four to seven seconds, because transformers writes its docstring when it is imported. What
a class says of a config is therefore kept in the cache, under the config, the release and its place, and the code that asks.
A class may also be registered while a program runs: where transformers is imported already, the class that is registered is asked
itself, once of each config.
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
"""Configs of which a process remembers what their classes said: an audit asks a dozen times of each of two or three."""


@dataclass(frozen=True)
class ClassSays:
    """What the configuration class of a model type says of one config."""

    values: Mapping[str, Any]
    """Every key of the class and its value for this config, {} where the class refuses the config."""
    names: Mapping[str, str]
    """Other names that the class reads -> the name under which it holds the value."""


def release() -> str:
    """Its version."""
    return importlib.metadata.version("transformers")


def configuration_class(config: Mapping[str, Any]) -> Any:
    """The configuration class of a config's `model_type`, None where this transformers has none."""
    import transformers

    kind = config.get("model_type")
    return transformers.CONFIG_MAPPING[kind] if isinstance(kind, str) and kind in transformers.CONFIG_MAPPING else None


def class_says(config: Mapping[str, Any]) -> ClassSays | None:
    """What transformers' class of this model type says of a config; None where it has no such class."""
    try:
        written = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError):  # no config.json holds such a value
        return _asked(config)
    if _is_imported():
        return _of_class(configuration_class(config), written)
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ClassSays(**json.loads(_place(written).read_text()))
    return _asked_and_kept(written)


@functools.lru_cache(maxsize=ASKED)
def _of_class(of_kind: Any, written: str) -> ClassSays | None:
    """What this very class says: another one may be registered under its name."""
    return _asked_and_kept(written)


def _asked_and_kept(written: str) -> ClassSays | None:
    config = json.loads(written)
    says = _asked(config)
    if says is not None and configuration_class(config).__module__.startswith("transformers."):
        keep_text(_place(written), json.dumps(asdict(says)))
    return says


def lacks(config: Mapping[str, Any]) -> str:
    """A sentence that says so where there is no class for a config, "" where there is one."""
    if class_says(config) is not None:
        return ""
    return f"transformers {release()}, which this interpreter has, knows no model type `{config.get('model_type')}`"


def instead(config: Mapping[str, Any]) -> str:
    """What to do about it: a hint."""
    return f"install a transformers that has `{config.get('model_type')}`, or parity-audit in an environment of its own"


def _is_imported() -> bool:
    return "transformers" in sys.modules


def _asked(config: Mapping[str, Any]) -> ClassSays | None:
    import transformers

    of_kind = configuration_class(config)
    if of_kind is None:
        return None
    names = {str(old): str(new) for old, new in of_kind.attribute_map.items()}
    said = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        made = of_kind(**copy.deepcopy({key: value for key, value in config.items() if key != "model_type"}))
        return ClassSays(values=json.loads(made.to_json_string(use_diff=False)), names=names)
    except Exception:  # a foreign class refuses in its own ways; the values themselves are checked elsewhere
        return ClassSays(values={}, names=names)
    finally:
        transformers.logging.set_verbosity(said)


def _place(written: str) -> Path:
    """Where the cache keeps what is said of a config."""
    found = importlib.util.find_spec("transformers")
    place = Path(str(found.origin)) if found is not None and found.origin else Path()
    installed = f"{release()}:{place}:{place.stat().st_mtime_ns if place.is_file() else 0}"
    name = hashlib.sha256(f"{installed}:{Path(__file__).read_text()}:{written}".encode()).hexdigest()[:24]
    return cache_root() / FOLDER / f"{name}.json"
