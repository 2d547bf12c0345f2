"""The constants that a spec gives for one model, in a form to show to users."""

from __future__ import annotations

from dataclasses import dataclass

from parity_audit.core.by_layer import by_layer
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.schema import ResolvedKnob, Spec
from parity_audit.specs.view import dims, knob_values


@dataclass(frozen=True, kw_only=True)
class ShownSpec:
    """A model's constants as (knob, value, backends that can set it).

    A value that differs between layers has the form of `core.by_layer`.
    """

    repo_id: str
    spec: Spec
    knobs: tuple[tuple[str, object, tuple[str, ...]], ...]


def show_spec(model: str) -> ShownSpec:
    """Return the constants of a model and the backends that can set each. Raises UsageError for an unknown model."""
    resolved = resolve_model(model)
    values = knob_values(resolved.spec, resolved.config)
    n_layers = dims(resolved.spec, resolved.config)["n_layers"]
    backends = resolved.spec.content.backends
    rows = tuple(
        (
            knob,
            _in_all_layers(known, n_layers),
            tuple(name for name, part in backends.items() if (item := part.knobs.get(knob)) and item.every_edit),
        )
        for knob, known in values.items()
    )
    return ShownSpec(repo_id=resolved.repo_id, spec=resolved.spec, knobs=rows)


def _in_all_layers(known: ResolvedKnob, n_layers: int) -> object:
    """Return the value if all layers share it, else the values by layer."""
    values = [known.at(layer) for layer in range(n_layers)]
    return values[0] if all(value == values[0] for value in values) else by_layer(dict(enumerate(values)))
