"""The corpus of planted faults: YAML files of faults, and templates that plant the same fault in many architectures.

A fault consists of what is planted (`plant`, operations of `plants.py`) and what an audit must report about it. A module may be
named by the site that it computes, `@blocks.{l}.ln1.out`; the spec's hf section gives the module of the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from parity_audit.core.errors import UsageError
from parity_audit.specs.load import list_specs, read_yaml
from parity_audit.specs.resolve import resolve_model
from parity_audit.specs.view import config_names, dims, entry_of, section

REPOSITORY_FAULTS = Path(__file__).resolve().parents[2] / "tests" / "faults"
ALWAYS = "true"
"""The condition of a site that every model with the spec has."""
OF_A_LAYER = re.compile(r"\bl\b")
"""Matches the layer `l` in a condition; such a condition may be true in some blocks and false in others."""
MODULE_KEYS = ("module", "block", "norm")
SITE = "@"
"""The prefix of a site's name that stands for the module which computes the site."""


SETTINGS = ("config", "set", "norm_eps")
NORM_SETTINGS = {"op", "module", "layers", "eps", "offset"}


class Fault(BaseModel):
    """One planted fault and what an audit must report about it.

    - `knob`: the name or names that must be found, exactly.
    - `also`: names of findings that are also true of the plant, and so are no false alarms (a changed tensor, for example, is also
      found by the comparison of weights before anything runs).
    - `value`, `layers`, `site` (of the first divergence), `extent` (words that must occur in the extent of the finding): checked
      only if given.
    - `sites`: for several faults planted together, the site of each, in the order of `knob`.
    - `host`: the TransformerLens release into which the faults are planted instead of transformers; if `plant` is empty, the backend
      release that has the fault by itself.
    - `harmless`: the plant is not a fault in this model, so any finding is a false alarm.
    - `long`: only the long probe shows the fault.
    - `quick`: the fault is in the subset that runs by default.
    - `template`: the fault comes from a template that plants the same fault in several models.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    plant: list[dict[str, Any]]
    knob: str | list[str]
    model: str = ""
    value: float | str | None = None
    layers: list[int] | None = None
    site: str | None = None
    also: list[str] = []
    extent: str | None = None
    sites: list[str] = []
    host: str = ""
    tags: list[str] = []
    source: str = ""
    harmless: bool = False
    long: bool = False
    quick: bool = False
    template: bool = False

    @property
    def knobs(self) -> tuple[str, ...]:
        """All names that must be found."""
        return (self.knob,) if isinstance(self.knob, str) else tuple(self.knob)

    @property
    def patchable(self) -> bool:
        """Whether every plant changes a setting that the loaded model still reads, so that a patch can repair it.

        Other plants, and the errors of a release, are in the code.
        """
        return bool(self.plant) and all(
            step["op"] in SETTINGS or (step["op"] == "norm" and step.keys() <= NORM_SETTINGS) for step in self.plant
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    models: list[str] = []
    tags: list[str] = []
    faults: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The faults of the corpus, by the model in which they are planted."""

    by_model: Mapping[str, tuple[Fault, ...]]

    def quick(self) -> Corpus:
        """Return the subset that runs by default."""
        chosen = {model: tuple(fault for fault in faults if fault.quick) for model, faults in self.by_model.items()}
        return Corpus(by_model={model: faults for model, faults in chosen.items() if faults})

    def tagged(self, tag: str) -> Corpus:
        """Return the faults with a tag. Raises UsageError if no fault has it."""
        every = [fault for faults in self.by_model.values() for fault in faults]
        chosen = [fault.id for fault in every if tag in fault.tags]
        if not chosen:
            known = sorted({name for fault in every for name in fault.tags})
            raise UsageError(f"no fault has the tag `{tag}`", code="corpus", expected=", ".join(known))
        return self.only(chosen)

    def only(self, ids: Sequence[str]) -> Corpus:
        """Return the faults with these ids. Raises UsageError if an id is unknown."""
        known = {fault.id: fault for faults in self.by_model.values() for fault in faults}
        unknown = [name for name in ids if name not in known]
        if unknown:
            near = get_close_matches(unknown[0], known, 3)
            raise UsageError(f"no fault `{unknown[0]}`", code="corpus", hint=f"did you mean {' or '.join(near)}?")
        chosen = [known[name] for name in ids]
        return Corpus(by_model={fault.model: tuple(x for x in chosen if x.model == fault.model) for fault in chosen})

    @property
    def size(self) -> int:
        """The number of faults."""
        return sum(len(faults) for faults in self.by_model.values())


def corpus_folder() -> Path:
    """Return the folder of the faults: in the installed wheel if it is there, else `tests/faults/` of a checkout."""
    packaged = Path(str(files("parity_audit"))) / "faults"
    return packaged if packaged.is_dir() else REPOSITORY_FAULTS


def load_corpus(models: Sequence[str] | None = None) -> Corpus:
    """Return every fault of the corpus, or those of some models.

    Raises:
        UsageError: no fault is planted in a model of that name, or two faults share an id.
    """
    by_model: dict[str, list[Fault]] = {}
    for path in sorted(corpus_folder().glob("*.yaml")):
        for fault in _read(path):
            by_model.setdefault(fault.model, []).append(fault)
    seen: set[str] = set()
    for fault in (fault for faults in by_model.values() for fault in faults):
        if fault.id in seen:
            raise UsageError(f"two faults are called `{fault.id}`", code="corpus")
        seen.add(fault.id)
    chosen = {
        name: tuple(faults)
        for name, faults in by_model.items()
        if not models or any(is_called(name, model) for model in models)
    }
    unknown = [model for model in models or () if not any(is_called(name, model) for name in chosen)]
    if unknown:
        slugs = [slug(name) for name in by_model]
        near = get_close_matches(slug(unknown[0]), slugs, 3) or sorted(slugs)
        raise UsageError(
            f"no fault is planted in `{unknown[0]}`", code="corpus", expected=", ".join(dict.fromkeys(near))
        )  # fmt: skip
    return Corpus(by_model=chosen)


def _read(path: Path) -> Iterator[Fault]:
    """Yield the faults of one file.

    A file with a list `models` is a template: its faults are planted in each of these models, or for `*` in the first model of every
    spec. In a file with neither `model` nor `models`, every fault names its own model.
    """
    content = _File.model_validate(_plain(read_yaml(path)))
    models = [spec.first_model for spec in list_specs()] if content.models == ["*"] else content.models
    for model in models or [content.model or ""]:
        for entry in content.faults:
            name = f"{slug(model)}-{entry['id']}" if content.models else entry["id"]
            fault = Fault.model_validate(
                {"model": model, "tags": content.tags, **entry, "id": name, "template": bool(models)}
            )
            if not models or fits(fault):
                yield fault


def fits(fault: Fault) -> bool:
    """Whether the modules that a template names by their sites exist in every block of its model."""
    named = [plant[key] for plant in fault.plant for key in MODULE_KEYS if str(plant.get(key, "")).startswith(SITE)]
    return all(_module(fault.model, name.removeprefix(SITE)) is not None for name in named)


def resolved(fault: Fault) -> list[dict[str, Any]]:
    """Return the plants with every `@site` replaced by the module that computes the site."""

    def named(value: Any) -> Any:
        is_site = isinstance(value, str) and value.startswith(SITE)
        return _module(fault.model, value.removeprefix(SITE)) if is_site else value

    return [{key: named(value) for key, value in plant.items()} for plant in fault.plant]


@cache
def _module(name: str, site: str) -> str | None:
    """Return the module that computes a site in the blocks of a model, with `{l}` for the block.

    Return None if the model does not have the site, or if only some of its blocks may have it there.
    """
    model = resolve_model(name)
    entry = section(model.spec, "hf", "").sites.get(site)
    if entry is None or OF_A_LAYER.search(entry.when):
        return None
    # Reading a config needs its class in transformers, which is slow to import, so it is read only if there is a condition.
    if entry.when == ALWAYS:
        return entry.module
    held = entry_of(entry, config_names(model.config, **dims(model.spec, model.config)))
    return None if held is None else held.module


def is_called(model: str, name: str) -> bool:
    """Whether a name means this model: its whole name or the last part of it, in upper or lower case."""
    return name.lower() in {model.lower(), slug(model)}


def slug(model: str) -> str:
    """Return the last part of a model's name, in lower case."""
    return model.rsplit("/", 1)[-1].lower()


def _plain(value: Any) -> Any:
    """Return a value read by ruamel.yaml with its containers and scalars converted to Python's own types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return float(value) if isinstance(value, float) else int(value) if isinstance(value, int) else str(value)
