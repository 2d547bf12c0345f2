"""Parse BACKEND strings: `name[==version][,key=value...]`, and `python:FILE:FUNCTION[,key=value...]` for a user's
own port."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef

BACKENDS = ("hf", "transformer_lens", "nnsight", "vllm", "sglang", "spec")
EXAMPLE = "hf==4.43.2,attn_implementation=sdpa"
PORT, PORT_FUNCTION = "python", "load"
LIVE = "live"
"""The backend name of a model that the calling process has loaded. No BACKEND string selects it;
`parity_audit.audit_live` does."""


def parse_backend(text: str) -> BackendRef:
    """Parse a BACKEND string. A value is read as JSON if it parses as JSON, `none` is null, and anything else is text.

    Raises:
        UsageError: the text has an unknown name, an empty version, a port without a file, or a setting that is not
            key=value.
    """
    if not isinstance(text, str):  # what people give to the Python API
        raise UsageError(
            f"a backend is given as text, not as {type(text).__name__}", code="unknown-backend", found=type(text).__name__,
            hint="a model that is loaded already is audited by parity_audit.audit_live(model, ...)",
        )  # fmt: skip
    head, *pairs = _split(text)
    if head.startswith(f"{PORT}:"):
        settings = dict(_setting(pair, text) for pair in pairs)
        return BackendRef(name=PORT, target=_port(head, text), settings=settings)
    name, equals, version = head.partition("==")
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, 1, 0.5)
        raise UsageError(
            f"`{name}` is not a backend", code="unknown-backend", found=text,
            expected=", ".join((*BACKENDS, f"{PORT}:FILE:FUNCTION")),
            hint=f"did you mean `{near[0]}`?" if near else f"for example `{EXAMPLE}`",
        )  # fmt: skip
    if equals and not version:
        raise UsageError(f"no version after `==` in `{text}`", code="backend-version", hint=f"for example `{EXAMPLE}`")
    return BackendRef(name=name, version=version or None, settings=dict(_setting(pair, text) for pair in pairs))


def _port(head: str, text: str) -> str:
    """Return FILE:FUNCTION with an absolute path; the function is `load` if the text names none."""
    file, colon, function = head.removeprefix(f"{PORT}:").rpartition(":")
    if not colon or not function.isidentifier():
        file, function = head.removeprefix(f"{PORT}:"), PORT_FUNCTION
    path = Path(file).expanduser()
    if not _is_file(path):
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*.py")], 1)
        raise UsageError(
            f"no file `{file}` for the port `{text}`", code="port-file", where=str(path.absolute()),
            hint=f"did you mean `{near[0]}`?" if near else "write it as `python:FILE:FUNCTION`",
        )  # fmt: skip
    return f"{path.resolve()}:{function}"


def report_names(refs: Sequence[BackendRef]) -> list[str]:
    """Return the name of each backend in reports: for a port, FILE:FUNCTION with as many folders as distinguish the
    files."""
    files = {Path(ref.target.rpartition(":")[0]) for ref in refs if ref.target and ref.name == PORT}
    return [_report_name(ref, files) for ref in refs]


def _report_name(ref: BackendRef, files: set[Path]) -> str:
    if ref.target is None or ref.name == LIVE:
        return ref.name
    file, _, function = ref.target.rpartition(":")
    parts = Path(file).parts
    for count in range(1, len(parts) + 1):
        if sum(other.parts[-count:] == parts[-count:] for other in files) == 1:
            break
    return f"{ref.name}:{'/'.join(parts[-count:])}:{function}"


def _is_file(path: Path) -> bool:
    """Return whether the file exists; False for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


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
        return json.loads(text, parse_constant=_not_a_number)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"`{text[:40]}` is no value of a setting", code="backend-setting", hint="a plain number, text or mapping"
        ) from error


def _not_a_number(text: str) -> Any:
    raise UsageError(f"`{text}` is no value of a setting", code="backend-setting", hint="give a finite number")
