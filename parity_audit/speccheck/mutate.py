"""Changes every constant of a spec, one at a time, and checks whether the reference contradicts the changed constant by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from parity_audit.core.progress import Progress
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values
from parity_audit.diagnose.fit.search import number_at, number_paths, with_number
from parity_audit.formulas.frequencies import attention_factor, rope_table
from parity_audit.formulas.knob import CHOICE, COUNT, FLAG, STRUCTURE, Knob
from parity_audit.formulas.knobs import KNOBS, meant
from parity_audit.speccheck.constants import contradictions, shown
from parity_audit.speccheck.judged import judged_components
from parity_audit.specs.schema import Spec

MORE, MUCH_MORE = 1.1, 0.1
"""The factor on a changed number, and the value that replaces 0."""
WHEN_ABSENT: dict[str, Any] = {
    "attention.softcap": 30.0, "logits.softcap": 30.0, "attention.window": 24, "attention.alibi": 1.0, "rope.partial": 16,
    "rope.theta": 10000.0, "rope.scaling": {"rope_type": "linear", "factor": 2.0},
}  # fmt: skip
"""The value to which a constant that is absent by the spec is changed."""
OF_ROTATION = ("rope.scaling", "rope.pairing", "rope.partial")
"""Constants that have no effect in a layer without a rotary base."""
PARTS_OF = {"n_kv_heads": "n_heads", "moe.groups": "n_experts"}
"""Counts that must divide another count of the model."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """The result for one changed constant.

    `named` tells whether the reference contradicted it by its name, `fitted` is the value found, and `why` tells what happened if it
    was not named.
    """

    knob: str
    change: str
    named: bool
    fitted: str = ""
    why: str = ""


NAMED_SHARE = 0.98
"""The share of all changed constants that must be contradicted by name."""


def mutated(spec: Spec, *, seed: int, progress: Progress) -> list[Mutation]:
    """Return the results of changing every constant of one spec, on captures that are taken once.

    Raises:
        NotJudged: transformers does not run the spec's miniature.
    """
    with judged_components(spec, seed, progress) as (residuals, components):
        return list(mutations(residuals, components))


def mutations(residuals: Residuals, components: Sequence[Component]) -> Iterator[Mutation]:
    """Yield the result of each change of each constant of the spec."""
    for knob in residuals.decoder.values:
        for change, values in changes(residuals, knob, _layers_that_ask(components, knob)):
            yield _judged(residuals, components, knob, change, values)


def _judged(residuals: Residuals, components: Sequence[Component], knob: str, change: str, values: Values) -> Mutation:
    asking = _asking(components, knob)
    found = contradictions(residuals, components, values, of=asking)
    if not found:
        why = "no component asks for it" if not asking else "every component is reproduced: no probe shows it"
        return Mutation(knob=knob, change=change, named=False, why=why)
    first = found[0]
    named = first.knob in (knob, f"qk_{knob}")
    return Mutation(
        knob=knob,
        change=change,
        named=named,
        fitted=shown(first.fitted),
        why="" if named else f"contradicted as: {first}",
    )


def _asking(components: Sequence[Component], knob: str) -> list[Component]:
    """Return the components whose formulas ask for a knob, or for the knob of norms of queries and keys that takes its value."""
    return [component for component in components if knob in component.knobs or f"qk_{knob}" in component.knobs]


def _layers_that_ask(components: Sequence[Component], knob: str) -> list[int] | None:
    """Return the layers in which a knob's value is read, or None (all layers) if it is read outside the blocks or nowhere."""
    found = {component.layer for component in _asking(components, knob)}
    return None if not found or None in found else sorted(layer for layer in found if layer is not None)


def changes(residuals: Residuals, knob: str, asked: Sequence[int] | None = None) -> Iterator[tuple[str, Values]]:
    """Yield (change in words, all knob values) for each way to change one constant.

    The values of layers outside `asked` stay unchanged, because these layers do not read the constant.
    """
    values, said, row = residuals.decoder.values, list(residuals.decoder.values[knob]), KNOBS[knob]
    layers = range(len(said)) if asked is None else asked
    own = [said[layer] for layer in layers]

    def with_own(new: Sequence[Any]) -> Values:
        given = dict(zip(layers, new, strict=True))
        return {**values, knob: [given.get(layer, old) for layer, old in enumerate(said)]}

    for value in _distinct(own):
        if knob in OF_ROTATION and not _rotates(values, [layer for layer in layers if said[layer] == value]):
            continue
        for change, other in _others(row, value, residuals):
            yield f"{shown(value)} -> {change}", with_own([other if old == value else old for old in own])
    if len(_distinct(own)) > 1:
        yield "one layer later", with_own([own[-1], *own[:-1]])


def _rotates(values: Values, layers: Sequence[int]) -> bool:
    """Whether one of these layers rotates anything."""
    bases = values.get("rope.theta")
    return bases is None or any(bases[layer] is not None for layer in layers)


def _distinct(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += [] if value in found else [value]
    return found


def _others(row: Knob, value: Any, residuals: Residuals) -> Iterator[tuple[str, Any]]:
    """Yield (value in words, value) for each other value of a knob that is tried."""
    if value is None:
        if row.name in WHEN_ABSENT:
            yield shown(WHEN_ABSENT[row.name]), WHEN_ABSENT[row.name]
        return
    if row.kind in (CHOICE, FLAG):
        own = _function(meant(row.name, value))
        other = next(choice for choice in row.choices if choice != value and _function(choice) != own)
        yield shown(other), other
    elif row.kind == STRUCTURE:
        for path in number_paths(value):
            other = with_number(value, path, number_at(value, path) * MORE)
            if path[1:] in ((), (1,)) and not _same_rotation(row, value, other, residuals):
                yield f"{path[0]} a tenth larger", other
    elif row.kind == COUNT:
        other = _count(row, value, residuals)
        yield shown(other), other
    elif isinstance(value, (int, float)):
        other = float(value) * MORE if value else MUCH_MORE
        yield shown(other), other
    if row.optional and not _is_absence(row, value, residuals):
        yield "none", None


def _is_absence(row: Knob, value: Any, residuals: Residuals) -> bool:
    """Whether a value has the same effect as None: `rope.partial` with all components of a head rotated."""
    dims = residuals.decoder.dims
    return row.name == "rope.partial" and value == dims.get("d_rope", dims["d_head"])


def _same_rotation(row: Knob, one: Any, other: Any, residuals: Residuals) -> bool:
    """Whether two scalings give the same angles, compared at lengths of 1, about the original context and twice of it.

    This happens if the kind of scaling does not read the changed key, or if YaRN rounds the changed number.
    """
    if row.name != "rope.scaling":
        return False
    values, dims = residuals.decoder.values, residuals.decoder.dims
    theta = next(float(value) for value in values["rope.theta"] if value is not None)
    d_rot = next((int(value) for value in values.get("rope.partial", ()) if value), dims["d_head"])
    original = int(one.get("original_max_position_embeddings") or 0)
    tables = [
        [rope_table(theta, scaling, d_rot, length) for length in (1, round(original * (1 + MORE) / 2), 2 * original)]
        for scaling in (one, other)
    ]
    return tables[0] == tables[1] and attention_factor(one) == attention_factor(other)


def _function(choice: Any) -> Any:
    """Return the value by which choices are compared: for a flag, `false` and None are equal."""
    return choice or None


def _count(row: Knob, value: int, residuals: Residuals) -> int:
    """Return another whole number that the model could have in place of this one."""
    dims = residuals.decoder.dims
    if row.name in PARTS_OF:
        whole = dims[PARTS_OF[row.name]]
        return next(count for count in range(whole, 0, -1) if whole % count == 0 and count != value)
    if row.name == "rope.partial":
        return value - 2
    return value - 1 if value == dims.get("n_experts") else value + 1
