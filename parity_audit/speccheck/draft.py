"""A first spec for an architecture that has none, from its config and its module tree.

What can be seen is written down: the released config, sizes of a miniature, biases, the name of the norms' eps, which of
the family's modules are there. What cannot be seen in names (is there a soft-cap, a multiplier, another order of norms?)
is marked TODO; `spec check` then says whether the model computes what the draft says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from torch import nn

from parity_audit.core.errors import UsageError
from parity_audit.specs.load import load_spec
from parity_audit.specs.schema import SiteEntry
from parity_audit.specs.skeleton import skeleton

FAMILY = "llama_like"
BIASES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
EPS_NAMES = ("variance_epsilon", "eps")
EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
FIRST_NORM, FINAL_NORM = "model.layers.0.input_layernorm", "model.norm"
HEADS, KV_HEADS, D_MLP, VOCAB, LAYERS = 4, 2, 352, 515, 4
UNSAID = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The YAML text, and what a person has to look at."""

    text: str
    todo: tuple[str, ...]


def draft_spec(repo_id: str, config: Mapping[str, Any]) -> Draft:
    """A spec that extends the llama family.

    Args:
        config: the released config.json.

    Raises:
        UsageError: transformers does not know the model type.
    """
    model = skeleton(config)
    modules = dict(model.named_modules())
    todo = [f"{site}: no module `{path}` here" for site, path in _missing(modules)]
    content: dict[str, Any] = {"architecture": config["architectures"][0], "extends": FAMILY}
    content["sources"] = [f"transformers {type(model).__module__.rpartition('.')[2]}", "config.json of each release"]
    content["models"] = {repo_id: {"config": {k: v for k, v in config.items() if k not in UNSAID}}}
    content["miniature"] = _miniature(config)
    knobs, hf = _constants(config, modules, todo)
    content |= {"knobs": knobs} if knobs else {}
    content |= {"backends": {"hf": {"knobs": hf}}} if hf else {}
    known = set(knobs) | {"attention.scale", "mlp.activation", "rope.theta"}
    todo += [f"config key `{key}` is not in the family: does it change what is computed?" for key in _unread(config)]
    head = "".join(f"# TODO {line}\n" for line in todo) if todo else f"# Inferred: {', '.join(sorted(known))}\n"
    return Draft(text=head + _yaml(content), todo=tuple(todo))


def _missing(modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Sites of the family whose module this model does not have."""
    sites = load_spec(FAMILY).content.backends["hf"].sites
    named = [(site, entry.module.replace("{l}", "0")) for site, entry in sites.items() if isinstance(entry, SiteEntry)]
    return [(site, path) for site, path in named if path not in modules]


def _constants(
    config: Mapping[str, Any], modules: Mapping[str, nn.Module], todo: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Knobs that differ from the family's, and how transformers holds them."""
    knobs: dict[str, Any] = {}
    hf: dict[str, Any] = {}
    for part, name in BIASES.items():
        if getattr(modules.get(f"model.layers.0.self_attn.{name}"), "bias", None) is not None:
            knobs[f"attention.{part}_bias"] = {"value": "true", "kind": "variant"}
    key = next((key for key in EPS_KEYS if key in config), None)
    if key is None:
        todo.append("norm.eps: no key of config.json that is known to hold it")
    elif key != "rms_norm_eps":
        knobs["norm.eps"] = {"value": key}
    if isinstance(modules.get(FINAL_NORM), nn.LayerNorm):
        knobs["norm.kind"] = {"value": "'layer'", "kind": "variant"}
    held = next((name for name in EPS_NAMES if hasattr(modules.get(FIRST_NORM), name)), None)
    if held not in (None, EPS_NAMES[0]):
        norms = ("model.layers[*].input_layernorm", "model.layers[*].post_attention_layernorm", FINAL_NORM)
        edits = [{"op": "set", "path": f"{norm}.{held}", "value": "=value"} for norm in norms]
        hf["norm.eps"] = {"read": f"{norms[0]}.{held}", "edits": edits}
    return knobs, hf


def _unread(config: Mapping[str, Any]) -> list[str]:
    """Config keys that name a constant of a kind that the family does not have."""
    words = (
        "multiplier",
        "scale",
        "softcap",
        "soft_cap",
        "window",
        "clip",
        "logit",
        "norm_topk",
        "experts",
        "layernorm",
        "no_rope",
        "partial",
    )
    neutral = (None, False, 1, 1.0, 0)
    return sorted(
        key for key, value in config.items()
        if any(word in key for word in words) and value not in neutral and key not in ("rope_scaling", *EPS_KEYS)
    )  # fmt: skip


def _miniature(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes only. Where the config has no head_dim, d_head is d_model over heads, and stays what it is."""
    grouped = config.get("num_key_value_heads", config["num_attention_heads"]) != config["num_attention_heads"]
    wide = 96 if config.get("head_dim") else HEADS * (config["hidden_size"] // config["num_attention_heads"])
    sizes = {"hidden_size": wide, "intermediate_size": D_MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
             "num_key_value_heads": KV_HEADS if grouped else HEADS, "vocab_size": VOCAB}  # fmt: skip
    small = {**sizes, "hidden_size": 8 * wide if config.get("head_dim") else 2 * wide, "intermediate_size": 2816,
             "num_hidden_layers": 12, "num_attention_heads": 2 * HEADS, "vocab_size": 32003}  # fmt: skip
    return {"mini": sizes, "small": small}


def _yaml(content: Mapping[str, Any]) -> str:
    writer, out = YAML(typ="safe", pure=True), StringIO()
    writer.default_flow_style, writer.sort_base_mapping_type_on_output, writer.width = False, False, 120  # type: ignore[assignment]
    writer.dump(json.loads(json.dumps(dict(content))), out)
    return out.getvalue()


def written(draft: Draft, out: Path) -> Path:
    """The file, which must not be there yet. Raises UsageError when it is."""
    if out.exists():
        raise UsageError(f"{out} is there already", code="spec-exists", where=str(out), hint="name another with --out")
    out.write_text(draft.text)
    return out
