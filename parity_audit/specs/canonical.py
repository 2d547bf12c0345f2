"""Convert a config.json to one canonical form, whichever release of transformers wrote it.

transformers 4 writes `rope_theta`, `rope_scaling`, `sliding_window_pattern`, `torch_dtype` and leaves out keys that
have their default value; transformers 5 writes `rope_parameters` (for the model, or for each kind of layer),
`layer_types`, `dtype`. Specs read the names of transformers 4, with every key present, and read from `layer_types`
which layers have a sliding window. Keys in the file are translated here; keys that the file leaves out get the value of
transformers' own configuration class.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from parity_audit.formulas.frequencies import kind_of
from parity_audit.specs.installed import config_class_values
from parity_audit.specs.wrapped import text_config

FULL, SLIDING = "full_attention", "sliding_attention"
OLDER_NAMES = {
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
    "hidden_size": "n_embed",
    "torch_dtype": "dtype",
}
"""The name that specs use -> another name for the same key, for the names that transformers reads although the
configuration class has no `attribute_map` entry for them."""
OTHER_KINDS = {"su": "longrope"}
"""Old name of a RoPE scaling -> the name that transformers gives it now."""
OF_LAYERS = "per_layer_config"
"""The key for settings in which single layers differ from the rest of the model. transformers writes a mapping from
layer number to settings; the canonical config holds a list with one entry for every layer."""
WIDTHS = "intermediate_size"
"""The width of the MLP. Some architectures have one width per layer, and a file may still give a single width for all layers."""
NEED_LENGTHS = ("yarn", "dynamic", "longrope")
"""RoPE scalings whose frequency table depends on the context length that the model was trained with."""


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with every key of its architecture, each under one name. A canonical config is returned unchanged."""
    try:
        return copy.deepcopy(_canonical(json.dumps(config, sort_keys=True)))
    except (TypeError, ValueError):  # a value that JSON cannot hold; the check of the caller reports it
        return dict(config)


def written_name(config: Mapping[str, Any], key: str) -> str:
    """Return the name under which this config holds the setting that specs call `key`; `key` itself if the config lacks it."""
    says = config_class_values(config)
    known = {} if says is None else says.names
    others = (known.get(key, key), OLDER_NAMES.get(key, key), *(old for old, new in known.items() if new == key))
    return next((name for name in (key, *others) if name in config), key)


@lru_cache(maxsize=128)
def _canonical(written: str) -> dict[str, Any]:
    config = text_config(json.loads(written))
    usual = _translated(_class_says(config), {})
    found = _translated(config, usual)
    return {**usual, **{key: usual.get(key) if value is None else value for key, value in found.items()}}


def _class_says(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every key of the model's configuration class with its value, each also under its other names.

    Empty if transformers has no class for this model type, or if the class rejects the values.
    """
    says = config_class_values(config)
    if says is None:
        return {}
    return {**{old: says.values[new] for old, new in says.names.items() if new in says.values}, **says.values}


def _translated(config: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config under the names of transformers 4; `usual` holds the values of its configuration class."""
    found = {key: value for key, value in config.items() if key != "rope_parameters"}
    for name, older in OLDER_NAMES.items():
        if found.get(name) is None and found.get(older) is not None:
            found[name] = found[older]
    found |= _rotary(found.get("rope_scaling")) | _rotary(config.get("rope_parameters"))
    merged = {**usual, **found}
    found["rope_scaling"] = _scaling(found.get("rope_scaling"), merged)
    layers, every = merged.get("num_hidden_layers"), found.get("sliding_window_pattern")
    if isinstance(layers, int) and isinstance(width := merged.get(WIDTHS), int) and isinstance(usual.get(WIDTHS), list):
        found[WIDTHS] = [width] * layers
    if isinstance(own := merged.get(OF_LAYERS), dict) and isinstance(layers, int):
        # The key of layer 4 is "4", or "04" in a model with more than ten layers.
        numbered = {int(layer): said for layer, said in own.items()}
        found[OF_LAYERS] = [numbered.get(layer, {}) for layer in range(layers)]
    if not isinstance(found.get("layer_types"), list) and isinstance(layers, int) and isinstance(every, int) and every:
        found["layer_types"] = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
    return found


def _rotary(given: Any) -> dict[str, Any]:
    """Return `rope_parameters` under the names of transformers 4.

    If it has separate entries for full and sliding attention, the entry for full attention is used, and the base of the
    sliding layers becomes `rope_local_base_freq`. The same translation is applied to `rope_scaling`, because
    transformers 5 reads it that way: a base inside it overrides `rope_theta`.
    """
    if not isinstance(given, dict):
        return {}
    local = given.get(SLIDING)
    if isinstance(local, dict) or isinstance(given.get(FULL), dict):
        base = local.get("rope_theta") if isinstance(local, dict) else None
        return {**_rotary(given.get(FULL)), **({} if base is None else {"rope_local_base_freq": base})}
    beside = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if given.get(key) is not None}
    scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {**beside, "rope_scaling": scaling}


def _scaling(given: Any, config: Mapping[str, Any]) -> Any:
    """Return a RoPE scaling with its current `rope_type` and the context lengths that it depends on; None if there is none."""
    if not isinstance(given, dict):
        return given
    kind = OTHER_KINDS.get(kind_of(given), kind_of(given))
    if kind == "default":
        return None
    rest = {key: value for key, value in given.items() if key not in ("type", "rope_type") and value is not None}
    if kind not in NEED_LENGTHS:
        return {"rope_type": kind, **rest}
    longest = config.get("max_position_embeddings")
    lengths = {"original_max_position_embeddings": config.get("original_max_position_embeddings") or longest}
    if kind == "longrope":
        lengths["max_position_embeddings"] = longest
    return {"rope_type": kind, **{key: value for key, value in lengths.items() if value is not None}, **rest}
