"""Find spec files, read them with line numbers, merge them over the spec that they extend, and validate them.

Errors name the file, the line and the key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from parity_audit.core.errors import SpecError, UsageError
from parity_audit.specs.likeness import with_likenesses
from parity_audit.specs.remembered import remembered
from parity_audit.specs.schema import BackendSection, Spec, SpecFile

MODULE_SECTION = "module"
OWN_SPECS = "PARITY_AUDIT_SPECS"
LARGEST_FILE, MOST_VALUES = 256 << 10, 100_000
"""The most bytes and the most values of a spec: more than ten times those of the largest shipped spec."""
REPOSITORY_SPECS = Path(__file__).resolve().parents[2] / "model_specs"


def specs_folder() -> Path:
    """Return the folder `model_specs/`, which is inside the installed wheel or at the root of a checkout."""
    packaged = Path(str(files("parity_audit"))) / "model_specs"
    return packaged if packaged.is_dir() else REPOSITORY_SPECS


def list_specs() -> tuple[Spec, ...]:
    """Return the spec of every architecture; files named `_*.yaml` and files that list no models (families) are left out.

    Files and folders named in the variable PARITY_AUDIT_SPECS come first, so that a user's own spec takes precedence
    over a shipped one.
    """
    return (*_specs_of(os.environ.get(OWN_SPECS, "")), *_shipped_specs())


@cache
def _shipped_specs() -> tuple[Spec, ...]:
    files = sorted(specs_folder().glob("*.yaml"))
    return remembered(files, lambda: _with_models(files))


@cache
def _specs_of(places: str) -> tuple[Spec, ...]:
    named = [Path(place) for place in places.split(os.pathsep) if place]
    return _with_models([file for path in named for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])])


def _with_models(files: Sequence[Path]) -> tuple[Spec, ...]:
    loaded = [load_spec(path) for path in files if not path.name.startswith("_")]
    return tuple(spec for spec in loaded if spec.content.models)


def load_spec(where: str | Path) -> Spec:
    """Return one spec, given its file or the name of a shipped spec.

    Raises:
        SpecError: broken YAML or a wrong key, with file, line and column.
        UsageError: no such spec.
    """
    path = Path(where)
    if path.suffix != ".yaml":
        path = specs_folder() / f"{where}.yaml"
    if not path.is_file():
        names = [item.stem for item in specs_folder().glob("*.yaml") if not item.name.startswith("_")]
        near = difflib.get_close_matches(str(where), names, 1)
        raise UsageError(
            f"no spec `{where}`", code="unknown-spec", expected=", ".join(sorted(names)),
            hint=f"did you mean `{near[0]}`?" if near else "",
        )  # fmt: skip
    merged = with_likenesses(_extended(path, ()), _merge)
    _validate(merged, path)
    return Spec(name=path.stem, file=str(path), content=SpecFile.model_validate(_plain(merged)))


def _extended(path: Path, seen: tuple[Path, ...]) -> CommentedMap:
    """Return the file merged over the spec that it extends. Its own values win, and `null` deletes an entry of the parent.

    Models are not inherited.
    """
    if path in seen:
        raise SpecError(f"`extends` goes in a circle: {path.name}", code="spec-extends", where=str(path))
    data = read_yaml(path)
    parent = data.get("extends")
    if parent is None:
        return data
    file = path.parent / f"{parent}.yaml"
    if not file.is_file() or file == path:  # a user's file may have the same name as the shipped spec that it extends
        file = specs_folder() / f"{parent}.yaml"
    if not file.is_file():
        raise SpecError(
            f"`extends: {parent}`: no such spec", code="spec-extends", where=_place(path, data, ("extends",))
        )
    own_problems = _problems(data, path, partial=True)
    if own_problems:
        raise own_problems
    family = {key: value for key, value in _extended(file, (*seen, path)).items() if key != "models"}
    merged: CommentedMap = _merge(CommentedMap(family), data)
    return merged


def read_yaml(path: Path) -> CommentedMap:
    """Return a YAML 1.2 file with line numbers; duplicate keys and Python tags are errors.

    The result is cached, so that a family that many specs extend is read once. The caller must not change it.
    """
    return _read_yaml(path, path.stat().st_mtime_ns)


@cache
def _read_yaml(path: Path, _changed: int) -> CommentedMap:
    yaml = YAML(typ="rt", pure=True)
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise SpecError(f"larger than {LARGEST_FILE >> 10} KiB", code="spec-yaml", where=str(path))
        data = yaml.load(StringIO(path.read_text()))
        _expansion(data, {})
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise SpecError(f"broken YAML: {error.problem}", code="spec-yaml", where=place) from error
    except SpecError:
        raise
    except RecursionError as error:
        raise SpecError("broken YAML: nested too deeply", code="spec-yaml", where=str(path)) from error
    except Exception as error:  # the parser raises many types, for example on impossible dates or unhashable keys
        raise SpecError(f"broken YAML: {str(error)[:300]}", code="spec-yaml", where=str(path)) from error
    if not isinstance(data, CommentedMap):
        raise SpecError("a spec is a mapping of keys", code="spec-yaml", where=str(path))
    return data


def _expansion(node: Any, known: dict[int, int | None]) -> int:
    """Return the number of values in a YAML node if every alias in it is expanded.

    Args:
        known: the counts by the id of the node; None for a node that is being counted.

    Raises:
        SpecError: the aliases expand to too many values, or a node contains itself.
    """
    if not isinstance(node, (CommentedMap, CommentedSeq)):
        return 1
    if id(node) not in known:
        known[id(node)] = None  # being counted; a node that contains itself finds this None again
        items = node.values() if isinstance(node, CommentedMap) else node
        known[id(node)] = 1 + sum(_expansion(item, known) for item in items)
    count = known[id(node)]
    if count is None or count > MOST_VALUES:
        raise SpecError("aliases stand for too many values", code="spec-yaml", expected=f"at most {MOST_VALUES}")
    return count


def _merge(base: Any, over: Any) -> Any:
    if not (isinstance(base, CommentedMap) and isinstance(over, CommentedMap)):
        return over
    out = CommentedMap(base)
    for key, value in over.items():
        out[key] = _merge(base.get(key), value) if key in base else value
    return out


def _validate(data: CommentedMap, path: Path) -> None:
    error = _problems(data, path, partial=False)
    if error:
        raise error


def _problems(data: CommentedMap, path: Path, *, partial: bool) -> SpecError | None:
    """Return the first mistake in a file, or None. With `partial`, keys may be missing, because a parent will provide them."""
    try:
        SpecFile.model_validate(_plain(data))
        return None
    except ValidationError as error:
        found = [item for item in error.errors() if not (partial and item["type"] == "missing")]
    if not found:
        return None
    item = min(found, key=lambda item: item["type"] == "missing")
    keys = tuple(part for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown_key(data, path, keys)
    return SpecError(
        f"`{keys[-1] if keys else 'the file'}`: {_message(item['msg'])}",
        code="spec-value",
        where=_place(path, data, keys),
        found=repr(item["input"])[:80],
    )


def _message(text: str) -> str:
    """Return the error message of pydantic in a form that fits into a sentence."""
    said = text.removeprefix("Value error, ")
    return said[:1].lower() + said[1:]


def _unknown_key(data: CommentedMap, path: Path, keys: tuple[int | str, ...]) -> SpecError:
    valid = _valid_keys(keys)
    near = difflib.get_close_matches(str(keys[-1]), valid, 1, 0.5)
    return SpecError(
        f"`{keys[-1]}` is not a key here", code="spec-unknown-key", where=_place(path, data, keys),
        expected=", ".join(valid), hint=f"did you mean `{near[0]}`?" if near else "",
    )  # fmt: skip


def _valid_keys(keys: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the schema allows at the place of the last of these keys."""
    kinds: list[Any] = [SpecFile]
    for key in keys[:-1]:
        kinds = [inner for kind in kinds for inner in _behind(kind, str(key))]
    return list(dict.fromkeys(name for kind in kinds if _is_model(kind) for name in kind.model_fields))


def _behind(kind: Any, key: str) -> list[Any]:
    """Return the types that the value under `key` may have inside a value of type `kind`.

    If a value may have one of several types, pydantic inserts the type's name into the path of keys; it is skipped
    here.
    """
    if _is_model(kind):
        field = kind.model_fields.get(key)
        return [kind] if key == kind.__name__ else _options(field.annotation) if field else []
    return _options(get_args(kind)[-1]) if get_args(kind) else []


def _options(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) in (Union, UnionType) else [kind]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _place(path: Path, data: CommentedMap, keys: tuple[int | str, ...]) -> str:
    """Return `file:line:column` of the deepest of these keys that the file itself contains, followed by the keys."""
    node: Any = data
    line, column = 0, 0
    for key in keys:
        if not isinstance(node, (CommentedMap, CommentedSeq)) or (isinstance(node, CommentedMap) and key not in node):
            break
        # A mapping that was created here around the content of a file has no positions.
        with contextlib.suppress(KeyError, AttributeError, TypeError, IndexError):
            line, column = node.lc.key(key) if isinstance(node, CommentedMap) else node.lc.item(key)
        node = node[key]
    return f"{path}:{line + 1}:{column + 1}   {'.'.join(map(str, keys))}"


def _plain(value: Any) -> Any:
    if isinstance(value, CommentedMap):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, CommentedSeq):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise SpecError(f"`{str(value)[:80]}` ({type(value).__name__}) is no value of a spec", code="spec-value")


def with_site_map(spec: Spec, path: Path) -> Spec:
    """Return the spec with an additional section `module`: a user's own map from sites to the modules of a plain `nn.Module`.

    Raises:
        SpecError: broken YAML or a wrong key, with file, line and column.
        UsageError: no such file.
    """
    if not path.is_file():
        raise UsageError(f"no site map `{path}`", code="site-map", where=str(path.absolute()))
    data = read_yaml(path)
    _validate(CommentedMap(architecture=spec.architecture, backends=CommentedMap({MODULE_SECTION: data})), path)
    section = BackendSection.model_validate(_plain(data))
    content = spec.content.model_copy(update={"backends": {**spec.content.backends, MODULE_SECTION: section}})
    return dataclasses.replace(spec, content=content)
