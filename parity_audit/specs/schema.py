"""The shape of a spec file, validated by pydantic; unknown keys are errors."""

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
"""Begins the versions of a variant that speaks of the transformers whose modules another engine runs."""


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
    """The value of an edit, every `=` string in it an expression."""
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
    """One released model: its other names, the config it was released with, sizes and scales of its own miniature.

    `around` is the config of the model that it was released in, where that sees images as well; of those its miniature has little.
    """

    aliases: list[str] = []
    config: dict[str, Any]
    miniature: dict[str, dict[str, int]] = {}
    weight_scales: dict[str, float] = {}
    around: dict[str, Any] = {}


class KnobEntry(_Strict):
    """One semantic constant: an expression on config keys, the layers where it holds, and `when` a model has it.

    An expression that names the layer, `l`, gives each layer a value of its own.
    """

    value: Expression
    when: Expression = "true"
    kind: str = "number"
    layers: Expression | None = None
    off: float | int | Expression | None = None
    source: str = ""


class SiteEntry(_Strict):
    """Where a backend shows a site, and `when` a model has it there (an expression of the config and of the layer `l`), and
    `otherwise` where else; see `core.types.SiteTap`.

    In `module`, `{l}` is the block and `{l+1}` the next one; `last`, where given, is the module for the last block.
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
    """Where a backend keeps a checkpoint tensor, with `when` and `otherwise` as in `SiteEntry`; see `core.types.WeightTap`."""

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
    """A checkpoint tensor that plays a role, or the part of a fused one; transforms as in `WeightEntry`. `when` the model has it,
    an expression of the config; `otherwise` the tensor that plays the role in other models, by its name where it does so whole."""

    tensor: str
    when: Expression = "true"
    otherwise: str | RoleEntry | None = None
    slice: list[Expression] | None = None
    layout: str = ""
    part: list[Expression] | None = None
    relayout: str = ""
    sizes: list[str] = []


class EditEntry(_Strict):
    """One edit, `when` a model has its place; strings that begin with `=` are expressions of `value` and the config."""

    op: str = "set"
    when: Expression = "true"
    path: str = ""
    value: Annotated[Any, AfterValidator(_filled_in)] = None


class BackendKnob(_Strict):
    """Where a backend holds a knob, and how to set it: by `edits`, which a section inherits or gives itself, and by
    `further_edits`, which it adds to them.
    """

    read: str | None = None
    from_read: Expression = "x"
    edits: list[EditEntry] | None = None
    further_edits: list[EditEntry] = []
    note: str = ""

    @property
    def every_edit(self) -> list[EditEntry]:
        """All of them, in the order in which they are made."""
        return [*(self.edits or ()), *self.further_edits]


class BackendVariant(_Strict):
    """What is different in some releases of a backend; merged over the section. `null` deletes.

    `versions` are those of the backend's package (`<5`), or of the transformers beneath it (`transformers <5`).
    `cannot_in` is why these releases do not run the architecture on a kind of device in a dtype, by both:
    `cpu float32`; `cpu` alone is every dtype there.
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
    """Everything one backend needs to know about one architecture.

    `like` names another backend whose section holds for this one wherever it says nothing itself; `renamed` are load
    settings of that backend, and what this one calls them.
    `cannot` is why it does not run the architecture at all, `cannot_alone` why it runs it only inside a model of several
    modalities. `other_weights` is the path, with `{name}`, of every
    checkpoint tensor that `weights` does not mention; empty where the backend has names of its own. `known` are errors
    of the backend itself, by the knob of their finding (`self-check: WORDS`: of the reference's), and their cause.
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
    """One architecture."""

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
    """The JSON Schema of spec files: what `docs/spec.schema.json` holds, for editors.

    A file that extends another may give a part of an entry, so only `architecture` is required.
    """
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **SpecFile.model_json_schema()}
    for entry in made["$defs"].values():
        entry.pop("required", None)
    return json.dumps({**made, "title": "parity-audit model spec"}, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A validated spec with its place on disk."""

    name: str
    file: str
    content: SpecFile

    @property
    def architecture(self) -> str:
        """The transformers class name."""
        return self.content.architecture

    @property
    def first_model(self) -> str:
        """The model that stands for the spec where it is checked: the first that it lists.

        Raises:
            UsageError: it lists none, as a family does that other specs extend.
        """
        if not self.content.models:
            raise UsageError(
                f"`{self.name}` lists no model to run", code="spec-models", where=self.file,
                hint="name a model under `models:`, or check a spec that extends this one",
            )  # fmt: skip
        return next(iter(self.content.models))

    def led_by(self, model: str) -> Spec:
        """The same spec with one of its models first."""
        models = {model: self.content.models[model], **self.content.models}
        return replace(self, content=self.content.model_copy(update={"models": models}))

    @property
    def fingerprint(self) -> str:
        """Hash of everything the spec says."""
        return hashlib.sha256(self.content.model_dump_json().encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ResolvedKnob:
    """A knob's value for one model: `value` on `layers` (all when None), `off` elsewhere; with `by_layer` a list, one per layer."""

    value: Any
    layers: tuple[int, ...] | None = None
    off: Any = None
    kind: str = "number"
    by_layer: bool = False

    def at(self, layer: int | None) -> Any:
        """The value in one layer."""
        if self.by_layer and layer is not None:
            return self.value[layer]
        return self.value if self.layers is None or layer is None or layer in self.layers else self.off
