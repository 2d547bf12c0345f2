"""Evaluate a spec for one config, one backend and one release: sizes, knob values, taps, roles of tensors, live readings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from packaging.specifiers import SpecifierSet

from parity_audit.core.types import Description, KnobValue, NotVisible, SiteTap, WeightTap
from parity_audit.specs.as_program import SPEC, own_section
from parity_audit.specs.canonical import canonical
from parity_audit.specs.expr import ExprError, evaluate, names_layer
from parity_audit.specs.places import knob_line
from parity_audit.specs.schema import (
    BENEATH,
    BackendKnob,
    BackendSection,
    KnobEntry,
    ResolvedKnob,
    RoleEntry,
    SiteEntry,
    Spec,
    WeightEntry,
)
from parity_audit.specs.wrapped import WRAPPED_IN


def dims(spec: Spec, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a config by name: d_model, n_heads, n_kv_heads, d_head, d_mlp, n_layers, d_vocab and any others."""
    return {name: int(value) for name, value in raw_sizes(spec, config).items()}


def raw_sizes(spec: Spec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a config, not yet converted to int.

    A size is left out if its value is null and its expression ends with `else null`, so that it may be absent.
    """
    names = config_names(config)
    found = {name: (text, evaluate(text, names)) for name, text in spec.content.dims.items() if text is not None}
    return {name: value for name, (text, value) in found.items() if value is not None or not text.endswith("else null")}


def dims_of_layer(spec: Spec, names: Mapping[str, Any], sizes: dict[str, int], layer: int | None) -> dict[str, int]:
    """Return the sizes of one block: those of the model, replaced by the spec's `layer_dims` where it has them.

    Args:
        names: the names that expressions may use (`config_names`).
    """
    if layer is None or not spec.content.layer_dims:
        return sizes
    own = {name: int(evaluate(text, {**names, "l": layer})) for name, text in spec.content.layer_dims.items()}
    return {**sizes, **own}


def config_names(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the names that an expression may use: the keys of the canonical config, constants, and `more`.

    The name `config` is the config itself: `config['key']` is null if the key is absent, where the plain name would be
    an error.
    """
    config = canonical(config)
    return {**config, "config": config, "true": True, "false": False, "null": None, **more}


def knob_values(spec: Spec, config: Mapping[str, Any]) -> dict[str, ResolvedKnob]:
    """Return the value of every knob that the model with this config has."""
    names = config_names(config, **dims(spec, config))
    found: dict[str, ResolvedKnob] = {}
    for knob, entry in spec.content.knobs.items():
        try:
            if entry is not None and evaluate(entry.when, names):
                found[knob] = _resolved(entry, names)
        except ExprError as error:
            error.where = f"{spec.file}:{knob_line(Path(spec.file), knob)}   knobs.{knob}"
            raise
    return found


def _resolved(entry: KnobEntry, names: Mapping[str, Any]) -> ResolvedKnob:
    if entry.layers is None and names_layer(entry.value):
        return _by_layer(entry, names)
    layers = None
    if entry.layers is not None:
        layers = tuple(l for l in range(names["n_layers"]) if evaluate(entry.layers, {**names, "l": l}))  # noqa: E741
    off = evaluate(entry.off, names) if isinstance(entry.off, str) else entry.off
    return ResolvedKnob(value=evaluate(entry.value, names), layers=layers, off=off, kind=entry.kind)


def _by_layer(entry: KnobEntry, names: Mapping[str, Any]) -> ResolvedKnob:
    """Return a knob whose value depends on the layer number; if all values are equal, it has a single value."""
    value = collapse_equal([evaluate(entry.value, {**names, "l": layer}) for layer in range(names["n_layers"])])
    return ResolvedKnob(value=value, kind=entry.kind, by_layer=isinstance(value, list))


def spec_values(spec: Spec, config: Mapping[str, Any]) -> dict[str, KnobValue]:
    """Return knob values in the form of live readings: one value, or a list with one value per layer if they differ."""
    layers = range(dims(spec, config)["n_layers"])
    known = knob_values(spec, config)
    return {knob: collapse_equal([item.at(layer) for layer in layers]) for knob, item in known.items()}


def collapse_equal(values: list[Any]) -> Any:
    """Return one value if all values of the list are equal, else the list."""
    return values[0] if all(value == values[0] for value in values) else values


def is_of(release: str, versions: str) -> bool:
    """Return whether a release (`Description.release`, or just a version) is one of a variant's `versions`.

    `<5` refers to the version of the engine itself, `transformers <5` to that of the transformers that it runs. False
    if that version is unknown.
    """
    own, _, beneath = release.partition(" on ")
    asked = beneath if versions.startswith(BENEATH) else own
    return bool(asked) and asked in SpecifierSet(versions.removeprefix(BENEATH), prereleases=True)


def section(spec: Spec, backend_key: str, release: str) -> BackendSection:
    """Return the section of a backend, with the variants for this release (see `is_of`) merged over it."""
    base = (
        own_section(spec.content) if backend_key == SPEC else spec.content.backends.get(backend_key, BackendSection())
    )
    parts: dict[str, dict[str, Any]] = {
        name: dict(getattr(base, name)) for name in ("sites", "not_visible", "weights", "knobs", "known")
    }
    for variant in base.variants:
        if is_of(release, variant.versions):
            for name, entries in parts.items():
                entries.update(getattr(variant, name))
    present: dict[str, Any] = {name: _present(entries) for name, entries in parts.items()}
    return BackendSection(**present, other_weights=base.other_weights, variants=[])


def reason_not_supported(
    spec: Spec, backend_key: str, release: str, config: Mapping[str, Any], *, device: str = "cpu", dtype: str = "float32"
) -> str:  # fmt: skip
    """Return why this release of a backend cannot run a model with this config; empty if the spec gives no such reason."""
    base = spec.content.backends.get(backend_key, BackendSection())
    own = [item for item in base.variants if is_of(release, item.versions)]
    alone = "" if config.get(WRAPPED_IN) else base.cannot_alone
    kind = device.partition(":")[0]
    said = (item.cannot or item.cannot_in.get(f"{kind} {dtype}") or item.cannot_in.get(kind) for item in own)
    return base.cannot or alone or next(filter(None, said), "")


def _present(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


def taps(spec: Spec, backend_key: str, config: Mapping[str, Any], release: str) -> tuple[SiteTap, ...]:
    """Return a tap for each site that this backend shows; sites inside blocks have one tap per layer."""
    sizes = dims(spec, config)
    names = config_names(config, **sizes)
    out: list[SiteTap] = []
    for site, entry in section(spec, backend_key, release).sites.items():
        assert entry is not None
        for name, layer in _per_layer(site, sizes["n_layers"]):
            here = dims_of_layer(spec, names, sizes, layer)
            own = entry_of(entry, at := {**names, **here, "l": layer})
            out += [] if own is None else [_tap(name, own, at, here, layer)]
    return tuple(out)


Entry = TypeVar("Entry", SiteEntry, WeightEntry)


def entry_of(entry: Entry, names: Mapping[str, Any]) -> Entry | None:
    """Return the first of an entry and its `otherwise` entries whose `when` is true for these names, which include the layer `l`.

    None if there is none, because the model does not have the site or tensor in this layer.
    """
    if evaluate(entry.when, names):
        return entry
    return None if entry.otherwise is None else entry_of(entry.otherwise, names)


def _per_layer(pattern: str, n_layers: int) -> list[tuple[str, int | None]]:
    if "{l}" not in pattern:
        return [(pattern, None)]
    return [(pattern.replace("{l}", str(layer)), layer) for layer in range(n_layers)]


def _tap(site: str, entry: SiteEntry, names: dict[str, Any], sizes: dict[str, int], layer: int | None) -> SiteTap:
    return SiteTap(
        site=site, module=_module(entry, sizes, layer), take=entry.take,
        slice=_slice(entry.slice, names), layout=entry.layout, part=_slice(entry.part, names), relayout=entry.relayout,
        sizes=_sizes(entry.sizes, sizes), scale=None if entry.scale is None else float(evaluate(entry.scale, names)),
    )  # fmt: skip


def _module(entry: SiteEntry, sizes: dict[str, int], layer: int | None) -> str:
    """Return the module path of a site in one layer; the last block may have a path of its own."""
    if layer is None:
        return entry.module
    if entry.last and layer == sizes["n_layers"] - 1:
        return entry.last
    return entry.module.replace("{l}", str(layer)).replace("{l+1}", str(layer + 1))


def _slice(entry: list[str] | None, names: dict[str, Any]) -> tuple[int, int] | None:
    return None if entry is None else (int(evaluate(entry[0], names)), int(evaluate(entry[1], names)))


AXIS_DIMS = {
    "d_head": "d_head", "head": "n_heads", "kv_head": "n_kv_heads", "d_model": "d_model", "d_mlp": "d_mlp", "expert": "n_experts",
    "key_head": "n_key_heads", "value_head": "n_value_heads", "stream": "n_streams",
}  # fmt: skip
COUNTS = {"two": 2, "three": 3}


def _sizes(axes: list[str], sizes: dict[str, int]) -> dict[str, int]:
    return {axis: COUNTS[axis] if axis in COUNTS else sizes[AXIS_DIMS.get(axis, axis)] for axis in axes}


def not_visible(spec: Spec, backend_key: str, config: Mapping[str, Any], release: str) -> tuple[NotVisible, ...]:
    """Return the sites that this backend cannot show, with the reasons."""
    layers = dims(spec, config)["n_layers"]
    return tuple(
        NotVisible(site=name, why=why or "")
        for site, why in section(spec, backend_key, release).not_visible.items()
        for name, _ in _per_layer(site, layers)
    )


def weight_taps(
    spec: Spec, backend_key: str, config: Mapping[str, Any], release: str, stored: Iterable[str] = ()
) -> tuple[WeightTap, ...]:
    """Return where this backend keeps each tensor of a checkpoint; `stored` are the names of the checkpoint's tensors."""
    sizes, own = dims(spec, config), section(spec, backend_key, release)
    names = config_names(config, **sizes)
    out: list[WeightTap] = []
    for name, entry in own.weights.items():
        assert entry is not None
        for full, layer in _per_layer(name, sizes["n_layers"]):
            here = dims_of_layer(spec, names, sizes, layer)
            own_entry = entry_of(entry, at := {**names, **here, "l": layer})
            if own_entry is not None:
                out += [_weight(one, item, at, here, layer) for one, item in _per_expert(full, own_entry, here)]
    known = {tap.name for tap in out} | _left_out(spec, backend_key, sizes["n_layers"])
    others = [name for name in stored if own.other_weights and name not in known]
    return (*out, *(WeightTap(name=name, path=own.other_weights.replace("{name}", name)) for name in others))


def _per_expert(name: str, entry: WeightEntry, sizes: dict[str, int]) -> list[tuple[str, WeightEntry]]:
    """Return the name and entry of one tensor; if the name contains `{e}`, one pair per expert."""
    if "{e}" not in name:
        return [(name, entry)]
    return [
        (name.replace("{e}", str(e)), entry.model_copy(update={"path": entry.path.replace("{e}", str(e))}))
        for e in range(sizes["n_experts"])
    ]


def _left_out(spec: Spec, backend_key: str, n_layers: int) -> set[str]:
    """Return the stored tensors that a backend's section sets to null: fused tensors, which are compared part by part."""
    entries = spec.content.backends[backend_key].weights if backend_key in spec.content.backends else {}
    return {full for name, entry in entries.items() if entry is None for full, _ in _per_layer(name, n_layers)}


def _weight(
    name: str, entry: WeightEntry, names: dict[str, Any], sizes: dict[str, int], layer: int | None
) -> WeightTap:
    path = entry.path.replace("{l}", str(layer)).replace("{e}", str(sizes.get("e", "{e}")))
    return WeightTap(
        name=name, path=path, slice=_slice(entry.slice, names), layout=entry.layout,
        part=_slice(entry.part, names), relayout=entry.relayout, sizes=_sizes(entry.sizes, sizes),
        scale=None if entry.scale is None else float(evaluate(entry.scale, names)),
        shift=None if entry.shift is None else float(evaluate(entry.shift, names)),
    )  # fmt: skip


def roles(spec: Spec, config: Mapping[str, Any], layer: int | None) -> dict[str, WeightTap]:
    """Return the checkpoint tensors by role (`embed`, `unembed`, `norm.ln1`, `attn.q` and so on).

    Without a layer, these are the tensors outside the blocks; with a layer, also those of this block. `path` is the
    tensor's name in the checkpoint; the tap of a part of a fused tensor also defines how to cut the part out. A role of
    experts gives one role per expert, with the expert's number at its end.
    """
    sizes = dims(spec, config)
    names = config_names(config, **sizes)
    sizes = dims_of_layer(spec, names, sizes, layer)
    names = {**names, **sizes, "l": layer}
    here = {
        role: entry
        for role, entry in spec.content.roles.items()
        if entry is not None and (layer is not None or "{l}" not in role_tensor(entry))
    }
    held = {role: _held(entry, names) for role, entry in here.items()}
    found = {role: entry for role, entry in held.items() if entry is not None}
    experts = range(sizes.get("n_experts", 0))
    one = {role: _role(role, entry, names, sizes, layer) for role, entry in found.items() if not of_experts(entry)}
    each = {
        f"{role}.{e}": _role(f"{role}.{e}", entry, {**names, "e": e}, {**sizes, "e": e}, layer)
        for role, entry in found.items() if of_experts(entry) for e in experts
    }  # fmt: skip
    return one | each


def unread_tensors(spec: Spec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of checkpoint tensors that have no role in this model because the `when` of their role is false.

    A role inside the blocks is checked in every layer. Roles of experts are left out.
    """
    sizes = dims(spec, config)
    names = config_names(config, **sizes)
    optional = [
        entry for entry in spec.content.roles.values()
        if isinstance(entry, RoleEntry) and entry.when != "true" and not of_experts(entry)
    ]  # fmt: skip
    out: list[str] = []
    for layer in (None, *range(sizes["n_layers"])):
        here = [entry for entry in optional if ("{l}" in entry.tensor) == (layer is not None)]
        at = {**names, **dims_of_layer(spec, names, sizes, layer), "l": layer} if here else {}
        out += [entry.tensor.replace("{l}", str(layer)) for entry in here if not evaluate(entry.when, at)]
    return tuple(out)


def of_experts(entry: str | RoleEntry) -> bool:
    """Return whether a role belongs to each expert: the tensor's name has `{e}`, or a part per expert is cut out of one tensor."""
    return "{e}" in role_tensor(entry) or (not isinstance(entry, str) and entry.slice == ["e", "e + 1"])


def _held(entry: str | RoleEntry, names: Mapping[str, Any]) -> str | RoleEntry | None:
    """Return the first of a role's entry and its `otherwise` entries that holds in this model; None if none does."""
    if isinstance(entry, str) or evaluate(entry.when, names):
        return entry
    return None if entry.otherwise is None else _held(entry.otherwise, names)


def role_tensor(entry: str | RoleEntry) -> str:
    """Return the name of the checkpoint tensor of a role, with `{l}` in place of the layer number."""
    return entry if isinstance(entry, str) else entry.tensor


def role_tensors(entry: str | RoleEntry) -> tuple[str, ...]:
    """Return the names of all checkpoint tensors that can have this role, including those of `otherwise` entries."""
    more = None if isinstance(entry, str) else entry.otherwise
    return (role_tensor(entry), *(() if more is None else role_tensors(more)))


def _role(
    role: str, entry: str | RoleEntry, names: dict[str, Any], sizes: dict[str, int], layer: int | None
) -> WeightTap:
    form = {} if isinstance(entry, str) else entry.model_dump(exclude={"tensor", "when", "otherwise"})
    return _weight(role, WeightEntry(path=role_tensor(entry), **form), names, sizes, layer)


def reads(spec: Spec, backend_key: str, release: str) -> dict[str, str]:
    """Return the live path of each knob whose value can be read back in this release."""
    knobs = section(spec, backend_key, release).knobs
    return {knob: entry.read for knob, entry in knobs.items() if entry is not None and entry.read is not None}


def effective_values(
    spec: Spec, backend_key: str, about: Description, config: Mapping[str, Any]
) -> dict[str, KnobValue]:
    """Return the live readings of a loaded backend, converted to knob values; equal values of all layers become one value."""
    knobs = section(spec, backend_key, about.release).knobs
    found: dict[str, KnobValue] = {}
    for knob, raw in about.effective.items():
        entry = knobs.get(knob)
        if entry is not None:
            values = [_converted(entry, value, config) for value in (raw if isinstance(raw, list) else [raw])]
            found[knob] = collapse_equal(values)
    return found


def _converted(entry: BackendKnob, raw: Any, config: Mapping[str, Any]) -> Any:
    try:
        return evaluate(entry.from_read, config_names(config, x=raw))
    except ExprError:
        return raw
