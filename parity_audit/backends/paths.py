"""Dotted paths into live objects: `model.layers[*].self_attn.scaling`, `blocks[3].attn.W_Q`, `cfg.attn_scale`.

`[3]` is an index, and `[*]` stands for every element. A dictionary is entered with `[key]`. A path with a step such as `k_norm?`
has no match in an object without that attribute; blocks of one model may differ in this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from parity_audit.backends import offload
from parity_audit.core.types import MAY_BE_MISSING

_STEP = re.compile(r"([^.\[\]]+)|\[(\*|[^\]]+)\]")


class NoSuchPath(LookupError):
    """A path that the live object does not have; the message says how far it exists."""


def steps(path: str) -> list[str | int]:
    """Split a path into attribute names, indices and `*`."""
    out: list[str | int] = []
    for name, index in _STEP.findall(path):
        out.append(name or ("*" if index == "*" else int(index) if index.lstrip("-").isdigit() else f"[{index}"))
    return out


def matches(root: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every concrete path that `path` stands for, with its value.

    Raises:
        NoSuchPath: the object does not have the path.
    """
    yield from _walk(root, steps(path), "")


def get(root: Any, path: str) -> Any:
    """Return the value at a path without `[*]`. Raises NoSuchPath if the object does not have the path."""
    return next(iter(matches(root, path)))[1]


def assign(root: Any, path: str, value: Any) -> None:
    """Write `value` at a concrete path."""
    *head, last = steps(path)
    holder = root
    for step in head:
        holder = _step(holder, step, path)
    if offload.is_offloaded(holder):
        raise ValueError(f"`{path}` is a part of a tensor that is offloaded; it can be changed as a whole only")
    if isinstance(last, int):
        holder[last] = value
    elif last.startswith("["):
        holder[last[1:]] = value
    elif not offload.put(holder, last, value):
        setattr(holder, last, value)


def _walk(value: Any, rest: list[str | int], done: str) -> Iterator[tuple[str, Any]]:
    if not rest:
        yield done, value
        return
    step, *tail = rest
    if isinstance(step, str) and step.endswith(MAY_BE_MISSING):
        step = step.removesuffix(MAY_BE_MISSING)
        if not hasattr(value, step):
            return
    if step == "*":
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _walk(item, tail, f"{done}[{key}]")
        return
    yield from _walk(_enter(value, step, done), tail, _joined(done, step))


def _enter(value: Any, step: str | int, done: str) -> Any:
    """Return the value that a step leads to; an offloaded weight is returned with its numbers."""
    found = _step(value, step, done)
    return offload.brought(value, step, found) if isinstance(step, str) else found


def _step(value: Any, step: str | int, done: str) -> Any:
    try:
        if isinstance(step, int):
            return value[step]
        return value[step[1:]] if step.startswith("[") else getattr(value, step)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise NoSuchPath(f"`{step}` is not in {type(value).__name__} (after `{done or 'the root'}`)") from error


def _joined(done: str, step: str | int) -> str:
    if isinstance(step, int):
        return f"{done}[{step}]"
    if step.startswith("["):
        return f"{done}{step}]"
    return f"{done}.{step}" if done else step
