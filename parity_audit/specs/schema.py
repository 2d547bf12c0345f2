"""The schema of a spec file as pydantic models; unknown keys are errors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from parity_audit.core.errors import UsageError
from parity_audit.specs.expr import ExprError, check

BENEATH = "transformers "
"""The prefix of a variant's `versions` if they are those of the transformers that the engine runs, not those of the engine."""


def _specifier(versions: str) -> str:
    try:
        SpecifierSet(versions.removeprefix(BENEATH))
    except InvalidSpecifier as error:
        raise ValueError(f"{error}; versions are written as `<5`, `>=5,<5.6` or `{BENEATH}<5`") from None
    return versions


def _expression(text: str) -> str:
    try:
        check(text)
    except ExprError as error:
        raise ValueError(error.message) from None
    return text


def _filled_in(value: Any) -> Any:
    """Return the value of an edit after a check that every string in it that begins with `=` is an expression."""
    if isinstance(value, str) and value.startswith("="):
        _expression(value[1:])
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _filled_in(item)
    return value


Expression = Annotated[str, AfterValidator(_expression)]
"""Arithmetic on the keys of a config (`specs.expr`)."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ModelEntry(_Strict):
    """One released model: its other names, the config it was released with, and sizes and weight scales of its own miniature.

    `around` is the config of the multimodal model that contains this text model, with small sizes, for the miniature.
    """

    aliases: list[str] = []
    config: dict[str, Any]
    miniature: dict[str, dict[str, int]] = {}
    weight_scales: dict[str, float] = {}
    around: dict[str, Any] = {}


class KnobEntry(_Strict):
    """One knob: its value as an expression on config keys, the layers with this value, and `when` a model has the knob.

    The other layers have the value `off`. If `value` uses the layer number `l`, each layer has a value of its own.
    """

    value: Expression
    when: Expression = "true"
    kind: str = "number"
    layers: Expression | None = None
    off: float | int | Expression | None = None
    source: str = ""


class SiteEntry(_Strict):
    """Where a backend shows a site; the other fields are those of `core.types.SiteTap`.

    The entry holds if `when` is true, an expression on the config and the layer `l`; if not, `otherwise` is used. In
    `module`, `{l}` is the number of the block and `{l+1}` that of the next one; `last`, if given, is the module for the
    last block.
    """

    module: str
    last: str = ""
    when: Expression = "true"
    take: str = "output"
    slice: list[Expression] | None = None
    layout: str = ""
    part: list[Expression] | None = None
    relayout: str = ""
    sizes: list[str] = []
    scale: Expression | None = None
    otherwise: SiteEntry | None = None


class WeightEntry(_Strict):
    """Where a backend keeps a checkpoint tensor; the other fields are those of `core.types.WeightTap`.

    `when` and `otherwise` are as in `SiteEntry`.
    """

    path: str
    when: Expression = "true"
    slice: list[Expression] | None = None
    layout: str = ""
    part: list[Expression] | None = None
    relayout: str = ""
    sizes: list[str] = []
    scale: Expression | None = None
    shift: Expression | None = None
    otherwise: WeightEntry | None = None


class RoleEntry(_Strict):
    """The checkpoint tensor that has a role, or a part of a fused tensor, cut out as in `WeightEntry`.

    The entry holds if `when` is true, an expression on the config and the layer `l`. If not, `otherwise` is used: the
    name of a tensor if the whole tensor has the role, else another entry.
    """

    tensor: str
    when: Expression = "true"
    otherwise: str | RoleEntry | None = None
    slice: list[Expression] | None = None
    layout: str = ""
    part: list[Expression] | None = None
    relayout: str = ""
    sizes: list[str] = []


class EditEntry(_Strict):
    """One edit of a backend, made for models in which `when` is true.

    Strings that begin with `=` are expressions on the knob's `value` and the config.
    """

    op: str = "set"
    when: Expression = "true"
    path: str = ""
    value: Annotated[Any, AfterValidator(_filled_in)] = None


class BackendKnob(_Strict):
    """How to read a knob's value from a backend, and how to set it.

    `read` is the path of the live value, which `from_read` converts (`x` is the raw value). A section inherits `edits`
    or replaces them; `further_edits` are added to them.
    """

    read: str | None = None
    from_read: Expression = "x"
    edits: list[EditEntry] | None = None
    further_edits: list[EditEntry] = []
    note: str = ""

    @property
    def every_edit(self) -> list[EditEntry]:
        """All edits in the order in which they are made."""
        return [*(self.edits or ()), *self.further_edits]


class BackendVariant(_Strict):
    """The differences in some releases of a backend, merged over its section; `null` deletes an entry of the section.

    `versions` are those of the backend's package (`<5`), or of the transformers that it runs (`transformers <5`).
    `cannot` is the reason why these releases do not run the architecture at all. `cannot_in` gives the reason for a
    kind of device and a dtype (key `cpu float32`), or for all dtypes on a kind of device (key `cpu`).
    """

    versions: Annotated[str, AfterValidator(_specifier)]
    sites: dict[str, SiteEntry | None] = {}
    not_visible: dict[str, str | None] = {}
    weights: dict[str, WeightEntry | None] = {}
    knobs: dict[str, BackendKnob | None] = {}
    cannot: str = ""
    cannot_in: dict[str, str] = {}
    known: dict[str, str | None] = {}


class BackendSection(_Strict):
    """Everything that is needed to audit one architecture in one backend.

    `like` names another backend whose section holds for this one where this one has no entry of its own; `renamed` maps
    load settings of that backend to the names that this one uses.

    `cannot` is the reason why the backend does not run the architecture at all, `cannot_alone` the reason why it runs
    it only inside a multimodal model.

    `other_weights` is the path, with `{name}`, of every checkpoint tensor that `weights` does not list; it is empty if
    the backend has its own tensor names.

    `known` lists known errors of the backend itself: the knob in the finding, or `self-check: WORDS` for a finding of
    the reference's self-check, and the cause.
    """

    like: str = ""
    renamed: dict[str, str] = {}
    sites: dict[str, SiteEntry | None] = {}
    not_visible: dict[str, str | None] = {}
    weights: dict[str, WeightEntry | None] = {}
    other_weights: str = ""
    knobs: dict[str, BackendKnob | None] = {}
    cannot: str = ""
    cannot_alone: str = ""
    known: dict[str, str | None] = {}
    variants: list[BackendVariant] = []


class SpecFile(_Strict):
    """The content of a spec file, which describes one architecture."""

    architecture: str
    extends: str | None = None
    sources: list[str] = []
    dims: dict[str, Expression | None] = {}
    layer_dims: dict[str, Expression] = {}
    models: dict[str, ModelEntry] = {}
    miniature: dict[str, dict[str, int]] = {}
    weight_scales: dict[str, float] = {}
    draws: dict[str, str] = {}
    roles: dict[str, str | RoleEntry | None] = {}
    knobs: dict[str, KnobEntry | None] = {}
    backends: dict[str, BackendSection] = Field(default_factory=dict)


def schema_text() -> str:
    """Return the JSON Schema of spec files, for editors; it is stored as `docs/spec.schema.json`.

    Within an entry no key is required, because a file that extends another may give only a part of the entry.
    """
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SpecFile.model_json_schema()}
    for entry in made["$defs"].values():
        entry.pop("required", None)
    return json.dumps({**made, "title": "parity-audit model spec"}, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A validated spec with its name and file."""

    name: str
    file: str
    content: SpecFile

    @property
    def architecture(self) -> str:
        """The name of the model class in transformers."""
        return self.content.architecture

    @property
    def first_model(self) -> str:
        """The first model that the spec lists, which is used to check the spec.

        Raises:
            UsageError: the spec lists no model, because it is a family that other specs extend.
        """
        if not self.content.models:
            raise UsageError(
                f"`{self.name}` lists no model to run", code="spec-models", where=self.file,
                hint="name a model under `models:`, or check a spec that extends this one",
            )  # fmt: skip
        return next(iter(self.content.models))

    def led_by(self, model: str) -> Spec:
        """Return the same spec with one of its models moved to the first place."""
        models = {model: self.content.models[model], **self.content.models}
        return replace(self, content=self.content.model_copy(update={"models": models}))

    @property
    def fingerprint(self) -> str:
        """A hash of the whole content of the spec."""
        return hashlib.sha256(self.content.model_dump_json().encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ResolvedKnob:
    """A knob's value for one model: `value` in `layers` (None: all layers), `off` in the other layers.

    With `by_layer`, `value` is a list with one value per layer.
    """

    value: Any
    layers: tuple[int, ...] | None = None
    off: Any = None
    kind: str = "number"
    by_layer: bool = False

    def at(self, layer: int | None) -> Any:
        """Return the value in one layer; for None, `value` itself."""
        if self.by_layer and layer is not None:
            return self.value[layer]
        return self.value if self.layers is None or layer is None or layer in self.layers else self.off
