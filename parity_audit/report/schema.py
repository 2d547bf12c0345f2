"""Generate JSON Schemas from the dataclasses: `python -m parity_audit.report.schema` prints that of report.json.

With the argument `card` it prints that of a card of the matrix.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
import types
import typing
from typing import Any

from parity_audit.core.card import CARD_VERSION, Card
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
    """Return the schema of the whole report; every dataclass and enum is one entry of `$defs`."""
    return _published(Report, SCHEMA_VERSION, "parity-audit report.json")


def card_schema() -> dict[str, Any]:
    """Return the schema of one card of the matrix."""
    return _published(Card, CARD_VERSION, "parity-audit card")


def _published(kind: Any, version: int, title: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    root = _schema(kind, definitions)
    definitions[kind.__name__]["properties"]["schema_version"] = {"const": version}
    return {"$schema": DRAFT, "title": title, **root, "$defs": dict(sorted(definitions.items()))}


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


SCHEMAS = {"report": report_schema, "card": card_schema}


def schema_text(of: str = "report") -> str:
    """Return the content of `docs/report.schema.json` or `docs/card.schema.json`."""
    return json.dumps(SCHEMAS[of](), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(*sys.argv[1:]), end="")
