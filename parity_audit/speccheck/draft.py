"""Drafts a first spec for an architecture that has none, from its config and its module tree.

The draft extends the nearest shipped spec, its parent. It contains what config and modules show: the released config, sizes of a
miniature, biases, the name of the norms' eps, and which of the parent's tensors and sites are missing. Names cannot show whether
there is a soft-cap, a multiplier or another order of norms. So every module that no site shows, every tensor without a role and
every config key that no constant reads is marked TODO. `spec check` then tells whether the model computes what the draft says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from torch import nn

from parity_audit.core.errors import UsageError
from parity_audit.speccheck.nearest import HF, OPTIONAL, Likeness, nearest, numbered
from parity_audit.speccheck.shapes import Shape, mlp_shape
from parity_audit.specs.canonical import canonical
from parity_audit.specs.schema import SiteEntry
from parity_audit.specs.skeleton import skeleton
from parity_audit.specs.unread import CONSTANTS, NO_FUNCTION, words_of

BIASES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
EPS_NAMES = ("variance_epsilon", "eps")
EPS_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
NORMS = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
FINAL_NORM = "model.norm"
ATTENTION = ("self_attn", "attn", "attention", "self_attention")
HEADS, KV_HEADS, D_MLP, VOCAB, LAYERS = 4, 2, 352, 515, 4
D_EXPERT = {"mini": 32, "small": 96}
LARGE = 20_000_000
"""The number of parameters above which a miniature is too large; the shipped ones have one to eight million."""
UNSAID = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map")
WITHOUT_THEIR_TENSORS = {"norm.q": "qk_norm.", "moe.router": "moe."}
"""The prefix of the parent's constants that are dropped if the tensor of this role is missing."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The YAML text of a draft, the name of the spec that it extends, and the points that a person has to check."""

    text: str
    extends: str
    todo: tuple[str, ...]


def draft_spec(repo_id: str, config: Mapping[str, Any]) -> Draft:
    """Return a draft of a spec that extends the nearest shipped one.

    Args:
        repo_id: the name of the model.
        config: the released config.json.

    Raises:
        UsageError: transformers does not know the model type, or the model has no attention.
    """
    model = skeleton(config)
    modules = dict(model.named_modules())
    _require_attention(config, modules)
    near = nearest(model, config)
    content: dict[str, Any] = {"architecture": config["architectures"][0], "extends": near.spec.name}
    content["sources"] = [f"transformers {type(model).__module__.rpartition('.')[2]}", "config.json of each release"]
    content["models"] = {repo_id: {"config": {k: v for k, v in config.items() if k not in UNSAID}}}
    content["miniature"] = _miniature(config)
    todo = [f"size of the miniature: it has {count:,} parameters" for count in _too_large(config, content["miniature"])]
    shape = mlp_shape(near, {numbered(path) for path in modules})
    content |= _gone(near, modules, shape)
    knobs, hf = _constants(config, modules, near, todo)
    if knobs:
        content["knobs"] = knobs
    if hf:
        content.setdefault("backends", {}).setdefault(HF, {})["knobs"] = hf
    todo += list(_to_look_at(near, modules, config, knobs, shape))
    head = f"# Nearest: {near.spec.name}, {near.share:.0%} of the tensors\n" + "".join(
        f"# TODO {line}\n" for line in todo
    )
    return Draft(text=head + _yaml(content), extends=near.spec.name, todo=tuple(todo))


def _require_attention(config: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> None:
    """Raise UsageError for a model without attention, which no spec of attention and MLP could describe."""
    named = {path.rpartition(".")[2] for path in modules}
    if "num_attention_heads" not in canonical(config) or not named & set(ATTENTION):
        raise UsageError(
            f"model type `{config.get('model_type')}` has no attention", code="unknown-architecture",
            expected=f"a decoder whose blocks hold one of {', '.join(ATTENTION)}",
            hint="state-space and recurrent models have no sites here yet",
        )  # fmt: skip


def _gone(near: Likeness, modules: Mapping[str, nn.Module], shape: Shape) -> dict[str, Any]:
    """Return the entries of the draft that delete the parent's roles, constants and sites that this model does not have.

    Roles and sites of an MLP of another shape (see `shapes`) are rewritten instead.
    """
    missing = {role for role in near.missing if not role.endswith(OPTIONAL) and role != "unembed"}
    roles = {**dict.fromkeys(missing - shape.settled), **shape.roles}
    knobs = {
        knob: None for role, family in WITHOUT_THEIR_TENSORS.items() if role in roles
        for knob in near.spec.content.knobs if knob.startswith(family)
    }  # fmt: skip
    gone = [site for site, _ in missing_sites(near, modules) if site not in shape.settled]
    backends: dict[str, Any] = {name: dict(section) for name, section in shape.backends.items()}
    for name, section in near.spec.content.backends.items():
        held = {site: None for site in gone if section.sites.get(site) is not None}
        if held and not section.like and not section.cannot:
            own = backends.setdefault(name, {})
            own["sites"] = {**held, **own.get("sites", {})}
    parts = {"roles": roles, "knobs": knobs, "backends": backends}
    return {key: part for key, part in parts.items() if part}


def missing_sites(near: Likeness, modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Return the sites of the parent for which this model has no module, each with the first module that the parent names."""
    held = {numbered(path) for path in modules}
    return [(site, paths[0]) for site, paths in _sites(near) if held.isdisjoint(paths)]


def _sites(near: Likeness) -> list[tuple[str, list[str]]]:
    """Return every site of the parent with the modules that show it; layers may differ in the module."""
    sites = near.spec.content.backends[HF].sites
    return [(site, list(_modules_of(entry))) for site, entry in sites.items() if isinstance(entry, SiteEntry)]


def _modules_of(entry: SiteEntry | None) -> Iterator[str]:
    while entry is not None:
        yield numbered(entry.module)
        entry = entry.otherwise


def _to_look_at(
    near: Likeness, modules: Mapping[str, nn.Module], config: Mapping[str, Any], knobs: Mapping[str, Any], shape: Shape
) -> Iterator[str]:
    """Yield the points that the draft leaves to a person."""
    for site, path in missing_sites(near, modules):
        if site not in shape.settled:
            yield f"{site}: no module `{path}` here"
    for name in near.unused:
        if not name.endswith(OPTIONAL) and name not in shape.settled:
            yield f"tensor `{name}`: no role of {near.spec.name} names it"
    shown = {path for _, paths in _sites(near) for path in paths} | shape.settled
    for path in sorted({numbered(path) for path, module in modules.items() if _weighs(module)} - shown):
        if path not in ("model.embed_tokens", "lm_head"):
            yield f"module `{path}`: no site shows it"
    for said in near.unread:
        yield f"{near.spec.name}: {said}"
    read = words_of(near.spec, CONSTANTS) | set(_words(knobs))
    for key in sorted(config.keys() & canonical(config).keys()):
        if key not in read and key not in EPS_KEYS and not NO_FUNCTION.search(key) and not _off(config[key]):
            yield f"config key `{key}` ({config[key]!r:.40}) is read by no constant: does it change what is computed?"


def _off(value: Any) -> bool:
    """Whether the value of a config key switches its feature off."""
    return value is None or value is False or value in ([], {})


def _words(knobs: Mapping[str, Any]) -> Iterator[str]:
    for entry in knobs.values():
        if entry:
            yield entry["value"]


def _weighs(module: nn.Module) -> bool:
    """Whether a module has tensors of its own, so that its output can be wrong although its input is right."""
    return next(module.parameters(recurse=False), None) is not None


def _constants(
    config: Mapping[str, Any], modules: Mapping[str, nn.Module], near: Likeness, todo: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the knobs that differ from the parent's, and the draft's entries on where transformers stores their values.

    What cannot be decided is added to `todo`.
    """
    knobs: dict[str, Any] = {}
    hf: dict[str, Any] = {}
    inherited = near.spec.content.knobs
    for part, name in BIASES.items():
        path = f"model.layers.0.self_attn.{name}"
        if getattr(modules.get(path), "bias", None) is not None and f"attention.{part}_bias" not in inherited:
            knobs[f"attention.{part}_bias"] = {"value": "true", "kind": "variant"}
    key = next((key for key in EPS_KEYS if key in config), None)
    said = inherited.get("norm.eps")
    if key is None:
        todo.append("norm.eps: no key of config.json that is known to hold it")
    elif said is None or key != said.value:
        knobs["norm.eps"] = {"value": key}
    if isinstance(modules.get(FINAL_NORM), nn.LayerNorm) and "layer" not in str(inherited.get("norm.kind")):
        knobs["norm.kind"] = {"value": "'layer'", "kind": "variant"}
    norms = [name for name in NORMS if f"model.layers.0.{name}" in modules]
    held = {name for name in EPS_NAMES for norm in norms if hasattr(modules[f"model.layers.0.{norm}"], name)}
    if norms and len(held) == 1 and held != {EPS_NAMES[0]}:
        paths = [*(f"model.layers[*].{norm}" for norm in norms), FINAL_NORM]
        edits = [{"op": "set", "path": f"{path}.{EPS_NAMES[1]}", "value": "=value"} for path in paths]
        hf["norm.eps"] = {"read": f"{paths[0]}.{EPS_NAMES[1]}", "edits": edits}
    return knobs, hf


def _miniature(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's sizes for the two miniatures.

    If the config has no head_dim, d_head is d_model over the number of heads, and the miniature keeps the d_head of the model.
    """
    grouped = config.get("num_key_value_heads", config["num_attention_heads"]) != config["num_attention_heads"]
    wide = 96 if config.get("head_dim") else HEADS * (config["hidden_size"] // config["num_attention_heads"])
    layers = min(LAYERS, config["num_hidden_layers"])
    sizes = {"hidden_size": wide, "intermediate_size": D_MLP, "num_hidden_layers": layers, "num_attention_heads": HEADS,
             "num_key_value_heads": KV_HEADS if grouped else HEADS, "vocab_size": VOCAB}  # fmt: skip
    small = {**sizes, "hidden_size": 8 * wide if config.get("head_dim") else 2 * wide, "intermediate_size": 2816,
             "num_hidden_layers": 12, "num_attention_heads": 2 * HEADS, "vocab_size": 32003,
             "num_key_value_heads": KV_HEADS if grouped else 2 * HEADS}  # fmt: skip
    experts = [key for key in config if key.endswith("_intermediate_size") and isinstance(config[key], int)]
    mini, small = (
        {**known, **dict.fromkeys(experts, D_EXPERT[size])} for size, known in (("mini", sizes), ("small", small))
    )
    return {"mini": mini, "small": small}


def _too_large(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[int]:
    """Return the number of parameters of the miniature if it is larger than `LARGE`, else an empty list."""
    small = {**config, **sizes["mini"], **_layers(config), **{key: 0 for key in config if key.endswith("_token_id")}}
    count = sum(tensor.numel() for tensor in skeleton(small).parameters())
    return [count] if count > LARGE else []


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value[:LAYERS] for key, value in config.items() if key == "layer_types" and isinstance(value, list)}


def _yaml(content: Mapping[str, Any]) -> str:
    writer, out = YAML(typ="safe", pure=True), StringIO()
    writer.default_flow_style, writer.sort_base_mapping_type_on_output, writer.width = False, False, 120  # type: ignore[assignment]
    writer.dump(json.loads(json.dumps(dict(content))), out)
    return out.getvalue()


def written(draft: Draft, out: Path) -> Path:
    """Write the draft to a file and return its path. Raises UsageError if the file exists."""
    if out.exists():
        raise UsageError(f"{out} is there already", code="spec-exists", where=str(out), hint="name another with --out")
    out.write_text(draft.text)
    return out
