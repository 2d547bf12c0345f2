"""Convert dataclasses to JSON and back. NaN and infinity never reach JSON: the caller counts them first."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from typing import Any, TypeVar, Union

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn dataclasses, enums and tuples into dicts, values and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON text.

    Raises:
        ValueError: a number is NaN or infinite, which is not valid JSON.
    """
    return json.dumps(to_plain(value), allow_nan=False, indent=indent, ensure_ascii=False)


def from_plain(kind: type[T], value: Any) -> T:
    """Build `kind` (a dataclass, or a type built of them) from plain JSON values.

    Raises:
        TypeError: a required field is missing, a field is unknown, a value has the wrong type, or values are nested too
            deeply.
        ValueError: a value is not in an enum, or a tuple has the wrong length.
    """
    try:
        return typing.cast(T, _build(kind, value))
    except RecursionError as error:
        raise TypeError("nested too deeply") from error


def _build(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _build_union(typing.get_args(kind), value)
    if origin in (list, tuple) or kind in (list, tuple):
        return _build_sequence(origin or kind, typing.get_args(kind), _of(list, value))
    if origin is dict:
        item = typing.get_args(kind)[1]
        return {key: _build(item, entry) for key, entry in _of(dict, value).items()}
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        fields = {key: _build(hints.get(key, Any), entry) for key, entry in _of(dict, value).items()}
        return typing.cast(Any, kind)(**fields)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    return _of(kind, value) if kind in (bool, int, float, str) else value


def _of(kind: type, value: Any) -> Any:
    """Return the value if it has that JSON type: a whole number is a float too, and a boolean is no number.

    Raises:
        TypeError: it has another type.
    """
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__} {value!r:.60}")
    return value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields. They are cached, since evaluating annotations takes longer than
    building a value."""
    return typing.get_type_hints(kind)


def _build_union(options: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in options:
        return None
    real = [option for option in options if option is not type(None)]
    return _build(real[0], value) if len(real) == 1 else value


def _build_sequence(origin: Any, args: tuple[Any, ...], value: list[Any]) -> Any:
    if not args:
        return origin(value)
    if origin is tuple and len(args) > 1 and args[-1] is not Ellipsis:
        return tuple(_build(arg, entry) for arg, entry in zip(args, value, strict=True))
    return origin(_build(args[0], entry) for entry in value)
