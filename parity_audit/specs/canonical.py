"""One view of a config.json, whichever release of transformers wrote it.

transformers 4 writes `rope_theta`, `rope_scaling`, `sliding_window_pattern`, `torch_dtype` and leaves out what is at its
default; transformers 5 writes `rope_parameters` (of the model, or of each kind of layer), `layer_types`, `dtype`. Specs
read the names of transformers 4, with every key present, and `layer_types` for which layers have a window. What the
file says is translated here; what it does not say is what transformers' own configuration class says.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from parity_audit.formulas.frequencies import kind_of
from parity_audit.specs.installed import class_says
from parity_audit.specs.wrapped import text_config

FULL, SLIDING = "full_attention", "sliding_attention"
OLDER_NAMES = {
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
    "hidden_size": "n_embed",
    "torch_dtype": "dtype",
}
"""Names that transformers reads without an `attribute_map` entry of the configuration class."""
OTHER_KINDS = {"su": "longrope"}
"""Names of RoPE scalings that transformers renamed."""
OF_LAYERS = "per_layer_config"
"""What a layer has otherwise than the model; transformers writes it by the number of the layer, here every layer has a place."""
WIDTHS = "intermediate_size"
"""A width of the MLP that some architectures have one of for each layer, where a file may say one for all."""
NEED_LENGTHS = ("yarn", "dynamic", "longrope")
"""Scalings whose table depends on the context that the model was trained for."""


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every key that its architecture has, under one name; a canonical one comes back as it is."""
    try:
        return copy.deepcopy(_canonical(json.dumps(config, sort_keys=True)))
    except (TypeError, ValueError):  # no config.json holds such a value; the caller's check names it
        return dict(config)


def written_name(config: Mapping[str, Any], key: str) -> str:
    """The name under which a config holds what specs call `key`; `key` where it holds no such thing."""
    says = class_says(config)
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
    """Every key of the configuration class of this model, {} where transformers has none or refuses the values."""
    says = class_says(config)
    if says is None:
        return {}
    return {**{old: says.values[new] for old, new in says.names.items() if new in says.values}, **says.values}


def _translated(config: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config under the names of transformers 4; `usual` has what its class says."""
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
        numbered = {int(layer): said for layer, said in own.items()}  # "4" or, of more than ten layers, "04"
        found[OF_LAYERS] = [numbered.get(layer, {}) for layer in range(layers)]
    if not isinstance(found.get("layer_types"), list) and isinstance(layers, int) and isinstance(every, int) and every:
        found["layer_types"] = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
    return found


def _rotary(given: Any) -> dict[str, Any]:
    """`rope_parameters` in the names of transformers 4: of full attention, and the base of the local layers beside it.

    transformers 5 reads `rope_scaling` in the same way: a base inside it holds, whatever `rope_theta` says beside it.
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
    """A RoPE scaling under one name of its kind, with the lengths that it depends on; None for no scaling."""
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
