"""Which shipped spec a new architecture is nearest to, by the tensors of its modules and the keys of its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from parity_audit.specs.expr import ExprError
from parity_audit.specs.load import list_specs, load_spec
from parity_audit.specs.schema import RoleEntry, Spec, WeightEntry
from parity_audit.specs.unread import CONSTANTS, words_of
from parity_audit.specs.view import knob_values, role_tensor

PLAINEST = "llama_like"
UNANSWERED = 0.9
"""How much less a spec counts whose constants ask for keys that the config has not: as one missing tensor of ten."""
HF = "hf"
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""Projections that some modules keep in one tensor."""
OPTIONAL = ".bias"
"""A family names the places of biases that only some of its models have."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """A spec, and how a model's tensors and its own meet."""

    spec: Spec
    missing: dict[str, str]
    """Roles of the spec whose tensor the model does not have, by role."""
    unused: tuple[str, ...]
    """Tensors of the model that no role names, `{l}` for the layer."""
    unread: tuple[str, ...]
    """Keys that the spec's constants ask for and the config does not have."""
    share: float
    """Tensors that both have, of those that either has; a fused projection counts as its parts."""
    literal: float
    """The same with a fused projection as a tensor of its own."""


def nearest(model: nn.Module, config: Mapping[str, Any]) -> Likeness:
    """The spec with the most tensors in common, then with constants that the config can say, then with more of its keys."""
    held = tensors(model)
    families = {spec.name: spec for spec in (load_spec(PLAINEST), *list_specs())}
    found = [likeness(spec, held, config) for spec in families.values()]

    def order(one: Likeness) -> tuple[float, float, int, tuple[int, int, str]]:
        lowered = UNANSWERED if one.unread else 1.0
        return (-one.share * lowered, -one.literal, -_keys_read(one.spec, config), _plainness(one.spec))

    return min(found, key=order)


def tensors(model: nn.Module) -> set[str]:
    """Names of the parameters, `{l}` for the layer and `{e}` for the expert."""
    return {numbered(name) for name, _ in model.named_parameters()}


def numbered(name: str) -> str:
    """The path of a module or tensor with `{l}` for its layer and `{e}` for its expert."""
    return re.sub(r"\.\d+(?=\.|$)", ".{e}", re.sub(r"\.\d+(?=\.|$)", ".{l}", name, count=1))


def likeness(spec: Spec, held: set[str], config: Mapping[str, Any]) -> Likeness:
    """How the tensors of a model and of one spec meet."""
    said, others = live_tensors(spec), _in_other_layers(spec)
    missing = {role: name for role, name in said.items() if held.isdisjoint({name, others.get(role, name)})}
    required = {name for role, name in missing.items() if not role.endswith(OPTIONAL) and role != "unembed"}
    known = {*said.values(), *held.intersection(others.values())}
    return Likeness(
        spec=spec, missing=missing, unused=tuple(sorted(held - known)), unread=_unanswered(spec, config),
        share=_share(_parted(held), _parted(known), _parted(held | required)),
        literal=_share(held, known, held | required),
    )  # fmt: skip


def _in_other_layers(spec: Spec) -> dict[str, str]:
    """The tensor that plays a role where the first one is not there, by role."""
    entries = {role: entry for role, entry in spec.content.roles.items() if isinstance(entry, RoleEntry)}
    return {role: role_tensor(entry.otherwise) for role, entry in entries.items() if entry.otherwise is not None}


def _share(held: set[str], said: set[str], either: set[str]) -> float:
    return len(held & said) / len(either)


def _parted(names: set[str]) -> set[str]:
    """The names with every fused projection as its parts."""
    return {name.replace(fused, part) for name in names for fused, parts in _parts_of(name) for part in parts}


def _parts_of(name: str) -> list[tuple[str, tuple[str, ...]]]:
    found = [(fused, parts) for fused, parts in FUSED.items() if f".{fused}." in name]
    return found or [("", ("",))]


def live_tensors(spec: Spec) -> dict[str, str]:
    """The parameter of transformers' module that holds each role's tensor."""
    section = spec.content.backends.get(HF)
    weights = section.weights if section else {}
    out: dict[str, str] = {}
    for role, entry in spec.content.roles.items():
        if entry is not None:
            stored = role_tensor(entry)
            kept = weights.get(stored)
            out[role] = re.sub(r"\[.*?\]$", "", kept.path) if isinstance(kept, WeightEntry) else stored
    return out


def _unanswered(spec: Spec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """What the first constant that cannot be worked out of this config asks for; () where all can."""
    try:
        knob_values(spec, config)
    except ExprError as error:
        return (error.message,)
    except Exception as error:  # a config of another architecture can have any value under a key
        return (str(error)[:80],)
    return ()


def _keys_read(spec: Spec, config: Mapping[str, Any]) -> int:
    return len(words_of(spec, CONSTANTS) & set(config))


def _plainness(spec: Spec) -> tuple[int, int, str]:
    """A family before its members, then the spec with the fewest constants of its own."""
    return (bool(spec.content.models), len(spec.content.knobs), spec.name)
