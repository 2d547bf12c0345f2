"""BACKEND strings: `name[==version][,key=value...]`."""

from __future__ import annotations

import difflib
import json
from typing import Any

from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef

BACKENDS = ("hf", "transformer_lens", "vllm")
EXAMPLE = "hf==4.43.2,attn_implementation=sdpa"


def parse_backend(text: str) -> BackendRef:
    """Read a BACKEND string. Values are JSON where they parse as JSON, `none` is null, anything else text.

    Raises:
        UsageError: unknown name, empty version, or a setting without `=`.
    """
    head, *pairs = _split(text)
    name, equals, version = head.partition("==")
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, 1, 0.5)
        raise UsageError(
            f"`{name}` is not a backend", code="unknown-backend", found=text, expected=", ".join(BACKENDS),
            hint=f"did you mean `{near[0]}`?" if near else f"for example `{EXAMPLE}`",
        )  # fmt: skip
    if equals and not version:
        raise UsageError(f"no version after `==` in `{text}`", code="backend-version", hint=f"for example `{EXAMPLE}`")
    return BackendRef(name=name, version=version or None, settings=dict(_setting(pair, text) for pair in pairs))


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes, so that JSON values stay whole."""
    parts, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == '"'
        depth += (char in "{[") - (char in "}]") if not quoted else 0
        if char == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _setting(pair: str, text: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise UsageError(
            f"`{pair}` in `{text}` is not key=value", code="backend-setting", hint=f"for example `{EXAMPLE}`"
        )  # fmt: skip
    return key.strip(), _value(value.strip())


def _value(text: str) -> Any:
    lowered = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in lowered:
        return lowered[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
