"""JSON Schema of report.json, generated from the dataclasses so that it cannot lag behind them."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any, Union

from parity_audit.core.report import Report


def report_schema() -> dict[str, Any]:
    """The schema, draft 2020-12."""
    definitions: dict[str, Any] = {}
    root = _schema(Report, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "parity-audit report",
        **root,
        "$defs": definitions,
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _reference(kind, definitions)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [item.value for item in kind]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg, definitions) for arg in args]}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": names[kind]} if kind in names else {}


def _reference(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        hints = typing.get_type_hints(kind)
        fields = dataclasses.fields(kind)
        definitions[kind.__name__] = {
            "type": "object",
            "additionalProperties": False,
            "required": [field.name for field in fields],
            "properties": {field.name: _schema(hints[field.name], definitions) for field in fields},
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}
