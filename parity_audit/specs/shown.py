"""What a spec says of one model, for people."""

from __future__ import annotations

from dataclasses import dataclass

from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.schema import Spec
from parity_audit.specs.view import knob_values


@dataclass(frozen=True, kw_only=True)
class ShownSpec:
    """A model's constants: (knob, value, backends that can set it)."""

    repo_id: str
    spec: Spec
    knobs: tuple[tuple[str, object, tuple[str, ...]], ...]


def show_spec(model: str) -> ShownSpec:
    """The constants of a model and where they can be set. Raises UsageError for an unknown model."""
    resolved = resolve_model(model)
    values = knob_values(resolved.spec, resolved.config)
    backends = resolved.spec.content.backends
    rows = tuple(
        (
            knob,
            known.value,
            tuple(name for name, part in backends.items() if (item := part.knobs.get(knob)) and item.every_edit),
        )
        for knob, known in values.items()
    )
    return ShownSpec(repo_id=resolved.repo_id, spec=resolved.spec, knobs=rows)
