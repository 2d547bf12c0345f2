"""The JSON Schema of report.json, generated from the dataclasses: `python -m parity_audit.report.schema`."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import types
import typing
from typing import Any

from parity_audit.core.report import SCHEMA_VERSION, Report

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SIMPLE: dict[Any, dict[str, Any]] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
}


def report_schema() -> dict[str, Any]:
    """The schema of the whole report; every dataclass is one entry of `$defs`."""
    definitions: dict[str, Any] = {}
    root = _schema(Report, definitions)
    definitions["Report"]["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {"$schema": DRAFT, "title": "parity-audit report.json", **root, "$defs": dict(sorted(definitions.items()))}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind in SIMPLE:
        return dict(SIMPLE[kind])
    if dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return _reference(kind, definitions)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(option, definitions) for option in args]}
    if origin in (list, tuple):
        return _array(origin, args, definitions)
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    raise TypeError(f"no schema for {kind!r}")


def _array(origin: Any, args: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    if origin is tuple and args[-1] is not Ellipsis:
        items = [_schema(item, definitions) for item in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": "array", "items": _schema(args[0], definitions)}


def _reference(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        definitions[kind.__name__] = _definition(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _definition(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    about = inspect.getdoc(kind) or ""
    if issubclass(kind, enum.Enum):
        return {"description": about, "enum": [member.value for member in kind]}
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    return {
        "description": about,
        "type": "object",
        "properties": {name: _schema(hints[name], definitions) for name in fields},
        "required": fields,
        "additionalProperties": False,
    }


def schema_text() -> str:
    """The file `docs/report.schema.json`."""
    return json.dumps(report_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
