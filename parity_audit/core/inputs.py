"""Convert arguments of the Python API from what users write: a path as text, a single backend, a dtype or a device
of torch."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from parity_audit.core.errors import UsageError
from parity_audit.core.types import BackendRef

Function = TypeVar("Function", bound=Callable[..., Any])


def accepting(**conversions: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Return a decorator that converts these arguments before the function is called; None and missing arguments
    stay as they are."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            for name, convert in conversions.items():
                if given.arguments.get(name) is not None:
                    given.arguments[name] = convert(given.arguments[name])
            return function(*given.args, **given.kwargs)

        return call  # type: ignore[return-value]

    return decorate


def path(value: str | os.PathLike[str]) -> Path:
    """Return a path, with `~` expanded.

    Raises:
        UsageError: the value is neither text nor a path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"a path is text or a Path, not {type(value).__name__}", found=repr(value))
    return Path(value).expanduser()


def several(value: Any) -> list[Any]:
    """Return a list: of one entry for a single backend or probe, of all entries for a sequence."""
    return [value] if isinstance(value, (str, BackendRef)) else list(value)


def torch_name(value: object) -> str:
    """Return the name of a dtype or device: `bfloat16` for `torch.bfloat16`, `cuda` for `torch.device("cuda")`."""
    return str(value).removeprefix("torch.")
