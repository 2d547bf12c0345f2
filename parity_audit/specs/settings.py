"""Find the edits that set a knob to a value in a backend, from the backend's section of a spec, one config and one release."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from parity_audit.core.types import EVERY, Edit, KnobValue
from parity_audit.formulas.alibi import times_usual
from parity_audit.formulas.choices import number_in
from parity_audit.formulas.frequencies import attention_factor, kind_of, rope_table
from parity_audit.formulas.knobs import KNOBS
from parity_audit.specs.expr import ExprError, evaluate
from parity_audit.specs.schema import EditEntry, ResolvedKnob, Spec
from parity_audit.specs.view import collapse_equal, config_names, dims, dims_of_layer, knob_values, roles, section
from parity_audit.specs.wrapped import of_the_text_model


def edits(
    spec: Spec,
    backend_key: str,
    knob: str,
    value: KnobValue,
    config: Mapping[str, Any],
    release: str,
    known: Mapping[str, KnobValue],
    now: KnobValue = None,
) -> tuple[Edit, ...] | None:
    """Return the edits that set a knob to a value in a backend; None if the backend has no setting that can take it.

    Args:
        known: the values of other knobs to use instead of the spec's; a rotary table, for example, needs base and
            scaling together.
        now: the knob's current value, for edits that are relative to it; None for the value in the spec.
    """
    entry = section(spec, backend_key, release).knobs.get(knob)
    if entry is None or not entry.every_edit or _has_words_with_a_number(knob, value):
        return None
    targets = {**{name: item.value for name, item in knob_values(spec, config).items()}, **known, knob: value}
    own = knob_values(spec, config).get(knob)
    sizes, before = dims(spec, config), own.value if now is None and own is not None else now
    names = config_names(config, **sizes, value=value, now=before)

    def rotaries(layers: Iterable[int] | None = None) -> list[dict[str, Any]]:
        dealt = {
            name: _per_layer(spec, config, name, given) for name, given in targets.items() if name.startswith("rope.")
        }
        return [
            _rotary(
                {name: given[layer] for name, given in dealt.items()},
                dims_of_layer(spec, names, sizes, layer)["d_head"],
            )
            for layer in (range(names["n_layers"]) if layers is None else layers)
        ]

    def rotates() -> list[bool]:
        return [base is not None for base in _per_layer(spec, config, "rope.theta", targets.get("rope.theta"))]

    def turning() -> list[int]:
        """Return the layers that use a rotary embedding; a table shared by all layers is computed from these."""
        return [layer for layer, turned in enumerate(rotates()) if turned]

    functions = {
        "rotary": lambda: collapse_equal(rotaries(turning() or None)),
        "rotaries": rotaries,
        "rotates": rotates,
        "rotary_of": lambda kind: rotaries()[names["layer_types"].index(kind)],
        "rope_parameters": lambda: _rope_parameters(targets, names),
        "per_layer": lambda: _per_layer(spec, config, knob, value),
        "windows": lambda: _per_layer(spec, config, knob, value),
        "widest_window": lambda: _widest(_per_layer(spec, config, knob, value)),
        "layer_types": lambda: _layer_types(_per_layer(spec, config, knob, value)),
        "times_usual_slopes": lambda: _expressible(times_usual(value)),
        "window_kinds": lambda: [
            "global" if window is None else "local" for window in _per_layer(spec, config, knob, value)
        ],
        "windowed": lambda: [window is not None for window in _per_layer(spec, config, knob, value)],
    }

    def filled(edit: EditEntry) -> Any:
        if own is None or not own.by_layer:
            try:
                return _filled(edit.value, names, functions)
            except ExprError:
                # Arithmetic on a list fails: the value has one number per layer, which a single setting cannot hold.
                if not isinstance(value, list) or EVERY not in edit.path:
                    raise
        each = zip(_per_layer(spec, config, knob, value), _per_layer(spec, config, knob, before), strict=True)
        return collapse_equal(
            [_filled(edit.value, {**names, "value": said, "now": held}, functions) for said, held in each]
        )

    try:
        made = tuple(
            Edit(op=edit.op, path=path, value=_said(edit.op, filled(edit), config))
            for edit in entry.every_edit
            if evaluate(edit.when, names)
            for path in _edit_paths(edit.path, spec, config)
        )
        return made or None
    except ExprError:  # a value that this setting cannot hold
        return None


def _has_words_with_a_number(knob: str, value: KnobValue) -> bool:
    """Return whether a value, in at least one layer, is text with a measured number in it, as in "swish(1.7)".

    Programs write such values in their code and have no setting for them.
    """
    templates = KNOBS[knob].measured if knob in KNOBS else ()
    every = value if isinstance(value, list) else [value]
    return any(number_in(said, words) is not None for said in every for words in templates)


def _said(op: str, value: Any, config: Mapping[str, Any]) -> Any:
    return of_the_text_model(value, config) if op == "load" else value


def _expressible(value: float | None) -> float:
    """Return the number; raise ExprError if it is None."""
    if value is None:
        raise ExprError("no single number says this")
    return value


def _edit_paths(path: str, spec: Spec, config: Mapping[str, Any]) -> list[str]:
    """Return the paths that an edit's path stands for.

    `role:norm.ln` stands for every checkpoint tensor whose role begins with `norm.ln`, except biases. Any other path
    stands for itself.
    """
    prefix = path.removeprefix("role:")
    if prefix == path:
        return [path]
    layers = range(dims(spec, config)["n_layers"])
    found = (
        tap.path
        for layer in (None, *layers)
        for role, tap in roles(spec, config, layer).items()
        if role.startswith(prefix) and not role.endswith(".bias")
    )
    return list(dict.fromkeys(map(live_path, found)))


def live_path(tensor: str) -> str:
    """Return the path in the module tree for the name of a checkpoint tensor: `.0` becomes the index `[0]`."""
    return re.sub(r"\.(\d+)", r"[\1]", tensor)


def _per_layer(spec: Spec, config: Mapping[str, Any], knob: str, setting: KnobValue) -> list[Any]:
    """Return one value per layer.

    If `setting` is a list with one entry per layer, return it. Otherwise return `setting` for the layers that have the
    knob in the spec, and the spec's `off` value for the others.
    """
    known = knob_values(spec, config).get(knob, ResolvedKnob(value=None))
    count = dims(spec, config)["n_layers"]
    if isinstance(setting, list) and len(setting) == count:
        return setting
    return [setting if known.layers is None or layer in known.layers else known.off for layer in range(count)]


def _widest(windows: list[Any]) -> int | None:
    """Return the largest window, because a transformers config can hold only one; None if no layer has a window."""
    return max((round(window) for window in windows if window), default=None)


def _layer_types(windows: list[Any]) -> list[str]:
    """Return the attention type of each layer in the words of transformers configs, from its window (None for no window)."""
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _rotary(targets: Mapping[str, Any], d_head: int) -> dict[str, Any]:
    scaling, d_rot = targets.get("rope.scaling"), int(targets.get("rope.partial") or d_head)
    table = rope_table(float(targets["rope.theta"]), scaling, d_rot)
    return {
        "inv_freq": table,
        "attention_factor": attention_factor(scaling),
        "pairing": targets.get("rope.pairing", "half"),
    }


def _rope_parameters(targets: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete rope dictionary, because current transformers drops the keys that an override leaves out."""
    scaling, turned = targets.get("rope.scaling") or {}, targets.get("rope.partial")
    # In latent attention, d_rope is the width of the rotated part of a head.
    whole = turned in (None, sizes.get("d_rope"))
    partial = {} if whole else {"partial_rotary_factor": turned / sizes["d_head"]}
    return {**scaling, **partial, "rope_type": kind_of(scaling), "rope_theta": targets["rope.theta"]}


def _filled(value: Any, names: dict[str, Any], functions: Mapping[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("="):
        return evaluate(value[1:], names, functions)
    if isinstance(value, dict):
        return {key: _filled(item, names, functions) for key, item in value.items()}
    return value


def edit_note(spec: Spec, backend_key: str, knob: str, release: str) -> str:
    """Return the spec's note for users on setting this knob in this backend; empty if there is none."""
    entry = section(spec, backend_key, release).knobs.get(knob)
    return entry.note if entry else ""
