"""Finds the shipped spec that is nearest to a new architecture, by the tensors of its modules and the keys of its config."""

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
"""The factor on the share of a spec whose constants need keys that the config does not have. It counts as much as one missing
tensor of ten."""
HF = "hf"
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "qkv_proj": ("q_proj", "k_proj", "v_proj")}
"""Projections that some modules store in one tensor, with their parts."""
OPTIONAL = ".bias"
"""The ending of roles whose tensors may be missing: a family also names biases that only some of its models have."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """How well the tensors of a model and the roles of a spec match."""

    spec: Spec
    missing: dict[str, str]
    """The tensors of the spec that the model does not have, by role."""
    unused: tuple[str, ...]
    """Tensors of the model that no role names, `{l}` for the layer."""
    unread: tuple[str, ...]
    """The reason why the spec's constants cannot be computed from the config (a missing key); empty if they can."""
    share: float
    """The share of tensors that both have among those that either has; a fused projection counts as its parts."""
    literal: float
    """The same share with a fused projection counted as one tensor."""


def nearest(model: nn.Module, config: Mapping[str, Any]) -> Likeness:
    """Return the match with the spec that has the largest share of tensors in common with the model.

    The share is reduced if the config cannot give the spec's constants (see `UNANSWERED`). Ties are broken by the literal share, by
    the number of the config's keys that the spec reads, and by plainness.
    """
    held = tensors(model)
    families = {spec.name: spec for spec in (load_spec(PLAINEST), *list_specs())}
    found = [likeness(spec, held, config) for spec in families.values()]

    def order(one: Likeness) -> tuple[float, float, int, tuple[int, int, str]]:
        lowered = UNANSWERED if one.unread else 1.0
        return (-one.share * lowered, -one.literal, -_keys_read(one.spec, config), _plainness(one.spec))

    return min(found, key=order)


def tensors(model: nn.Module) -> set[str]:
    """Return the names of the model's parameters, with `{l}` for the layer and `{e}` for the expert."""
    return {numbered(name) for name, _ in model.named_parameters()}


def numbered(name: str) -> str:
    """Return the path of a module or tensor with `{l}` for its layer and `{e}` for its expert."""
    return re.sub(r"\.\d+(?=\.|$)", ".{e}", re.sub(r"\.\d+(?=\.|$)", ".{l}", name, count=1))


def likeness(spec: Spec, held: set[str], config: Mapping[str, Any]) -> Likeness:
    """Return how well the tensors `held` by a model match one spec."""
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
    """Return the alternative tensor of each role that has one, for layers without the first one."""
    entries = {role: entry for role, entry in spec.content.roles.items() if isinstance(entry, RoleEntry)}
    return {role: role_tensor(entry.otherwise) for role, entry in entries.items() if entry.otherwise is not None}


def _share(held: set[str], said: set[str], either: set[str]) -> float:
    return len(held & said) / len(either)


def _parted(names: set[str]) -> set[str]:
    """Return the names with every fused projection replaced by its parts."""
    return {name.replace(fused, part) for name in names for fused, parts in _parts_of(name) for part in parts}


def _parts_of(name: str) -> list[tuple[str, tuple[str, ...]]]:
    found = [(fused, parts) for fused, parts in FUSED.items() if f".{fused}." in name]
    return found or [("", ("",))]


def live_tensors(spec: Spec) -> dict[str, str]:
    """Return the name of the parameter of transformers' model that holds the tensor of each role."""
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
    """Return the error of the first constant that cannot be computed from this config, or () if all can."""
    try:
        knob_values(spec, config)
    except ExprError as error:
        return (error.message,)
    except Exception as error:  # The config of another architecture may have any type of value under a key.
        return (str(error)[:80],)
    return ()


def _keys_read(spec: Spec, config: Mapping[str, Any]) -> int:
    return len(words_of(spec, CONSTANTS) & set(config))


def _plainness(spec: Spec) -> tuple[int, int, str]:
    """Return the sort key by which a family comes before its members, and then specs with fewer constants of their own."""
    return (bool(spec.content.models), len(spec.content.knobs), spec.name)
