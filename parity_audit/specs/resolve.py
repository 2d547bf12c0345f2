"""Find the spec, the repository id and the config of the model that a user names.

The architecture is never guessed from parts of the name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity_audit.core.errors import UsageError
from parity_audit.specs.hub.asking import ask_hub
from parity_audit.specs.hub.cached import cached_snapshot
from parity_audit.specs.load import list_specs, load_spec
from parity_audit.specs.other_forms import of_no_config
from parity_audit.specs.schema import Spec
from parity_audit.specs.wrapped import TEXT_MODEL, config_for, is_wrapper

LARGEST_CONFIG = 16 << 20
LONGEST_NAME = 255


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model: its id, the spec of its architecture, and the config it was released with.

    For a multimodal model, `config` is that of its text model (`wrapped.config_for`). If `local` is true, the user
    named a directory, and `repo_id` is its path as typed. `revision` is the branch, tag or commit of `MODEL@REVISION`,
    "" for the main branch.
    """

    repo_id: str
    spec: Spec
    config: dict[str, Any]
    local: bool = False
    revision: str = ""


def resolve_model(name: str, weights: Path | None = None) -> ResolvedModel:
    """Return the model for a hub id, an alias, a hub id without its owner, or a local directory with a config.json.

    A name that a spec lists always means that model, even if the working directory has a directory of the same name;
    write `./NAME` for the directory. The config of a hub id that no spec lists is looked up in the user's hub cache,
    then on the hub. The same holds for any id with `@REVISION`, because its config may differ from the one in the spec.

    Args:
        weights: a directory with weights for this model; the config is then read from there.

    Raises:
        UsageError: there is no model of that name (the nearest names are given), or its architecture has no spec.
    """
    _require_possible(name)
    if Path(name, "config.json").is_file() and _known(name) is None:
        return _in_directory(weights or Path(name), name, local=True)
    base, _, revision = name.partition("@")
    known = _known(base) or _by_its_end(base)
    repo_id = known[0] if known else base
    if weights is not None:
        return _in_directory(weights, repo_id)
    if known and not revision:
        return ResolvedModel(repo_id=repo_id, spec=known[1], config=known[1].content.models[repo_id].config)
    folder = cached_snapshot(repo_id, revision)
    if folder is None:
        answer = ask_hub(repo_id, revision)
        if answer.folder is None:
            raise _unknown(name, answer.why)
        folder = answer.folder
    config = read_config(folder)
    return _resolved(config, name, repo_id=repo_id, revision=revision)


def _in_directory(folder: Path, repo_id: str, *, local: bool = False) -> ResolvedModel:
    return _resolved(read_config(folder), str(folder), repo_id=repo_id, local=local)


def _resolved(config: dict[str, Any], where: str, **named: Any) -> ResolvedModel:
    spec = spec_for(config, where)
    return ResolvedModel(spec=spec, config=config_for(config, spec.architecture), **named)


def _require_possible(name: str) -> None:
    """Raise an error for a name that neither a file system nor the hub can have, before either is searched."""
    if not name.isprintable() or not name.strip() or max(map(len, name.split("/"))) > LONGEST_NAME:
        raise _unknown(name[:LONGEST_NAME], "no model can have that name")


def released_config(name: str) -> dict[str, Any]:
    """Return the config.json of a local directory, the user's hub cache, or the hub, even if its architecture has no spec.

    Raises:
        UsageError: there is none, or it names no architecture.
    """
    _require_possible(name)
    folder = Path(name) if Path(name, "config.json").is_file() else cached_snapshot(name) or ask_hub(name).folder
    if folder is None:
        raise _unknown(name, "no config.json was found")
    config = read_config(folder)
    if not config.get("architectures"):
        raise UsageError(f"{folder}/config.json names no architecture", code="bad-config", where=str(folder))
    return config


def spec_for(config: dict[str, Any], where: str) -> Spec:
    """Return the spec for `config["architectures"][0]`, or for `model_type` if the config names no architecture.

    For a multimodal model, return the spec for the `model_type` of its text model.

    Raises:
        UsageError: neither is named, or no spec has it.
    """
    architectures = config.get("architectures")
    if is_wrapper(config):
        return _spec_of_kind(config[TEXT_MODEL].get("model_type"), where)
    if architectures is None and isinstance(config.get("model_type"), str):
        return _spec_of_kind(config["model_type"], where)
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UsageError(
            "config.json names no architecture", code="bad-config", where=where,
            expected='"architectures": ["LlamaForCausalLM"], for example', found=str(architectures)[:80],
        )  # fmt: skip
    for spec in list_specs():
        if spec.architecture == architectures[0]:
            return spec
    raise _no_spec(f"architecture `{architectures[0]}`", where)


def _spec_of_kind(kind: Any, where: str) -> Spec:
    """Return the first spec that lists a model of this `model_type`; base models are often saved without `architectures`."""
    for spec in list_specs():
        if any(entry.config.get("model_type") == kind for entry in spec.content.models.values()):
            return spec
    raise _no_spec(f"model type `{kind}`", where)


def _no_spec(what: str, where: str) -> UsageError:
    known = ", ".join(spec.architecture for spec in list_specs())
    return UsageError(
        f"no spec for {what}", code="unknown-architecture", where=where, expected=known,
        hint="write one: model_specs/ has the others, CONTRIBUTING says how",
    )  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint directory. Raises UsageError if it cannot be read."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"larger than {LARGEST_CONFIG >> 20} MiB")
        loaded = json.loads(path.read_text())
        if not isinstance(loaded, dict):
            raise ValueError("it is no mapping of keys")
        return loaded
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}", code="bad-config", where=str(path)) from error


def spec_named(name: str) -> Spec:
    """Return a spec, given its file, its name or one of its models; such a model is put first in the spec's list of models.

    Raises:
        SpecError: broken YAML or a wrong key, with file, line and column.
        UsageError: no such spec and no such model.
    """
    try:
        return load_spec(name)
    except UsageError as error:
        if error.code != "unknown-spec":
            raise
        known = _known(name) or _by_its_end(name)
        if known is None:
            near = _nearest(name, [spec.name for spec in list_specs()])
            raise UsageError(
                f"no spec and no known model `{name}`", code="unknown-spec", expected=error.expected, hint=_did_you_mean(near)
            ) from None  # fmt: skip
        model, spec = known
        return spec.led_by(model)


def _known(name: str) -> tuple[str, Spec] | None:
    """Return the hub id and the spec of the listed model with this hub id or alias, ignoring case; None if there is none."""
    wanted = name.lower()
    return next(
        ((repo_id, spec) for spec in list_specs() for repo_id, entry in spec.content.models.items()
         if wanted in map(str.lower, (repo_id, *entry.aliases))), None,
    )  # fmt: skip


def _by_its_end(name: str) -> tuple[str, Spec] | None:
    """Return the hub id and the spec of the first listed model whose hub id without its owner is this name, ignoring case."""
    models = ((repo_id, spec) for spec in list_specs() for repo_id in spec.content.models)
    return next((one for one in models if one[0].rpartition("/")[2].lower() == name.lower()), None)


def _nearest(name: str, more: Iterable[str] = ()) -> list[str]:
    """Return up to three names, of all listed models and of `more`, that are spelt most like this one."""
    names = [*more] + [
        alias
        for spec in list_specs()
        for repo_id, entry in spec.content.models.items()
        for alias in (repo_id, *entry.aliases)
    ]
    lowered = {item.lower(): item for item in names}
    return [lowered[item] for item in difflib.get_close_matches(name.lower(), lowered, 3, 0.5)]


def _did_you_mean(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(f'`{item}`' for item in near)}?" if near else ""


def _unknown(name: str, hub_said: str) -> UsageError:
    if Path(name).is_dir():
        return of_no_config(Path(name))
    return UsageError(
        f"unknown model `{name}`: no spec lists it, it is not in the hub cache, and {hub_said}", code="unknown-model",
        hint=_did_you_mean(_nearest(name))
        or "`parity-audit specs list` shows the known ones; a local directory with config.json works too",
    )  # fmt: skip
