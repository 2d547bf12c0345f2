"""Arguments of the Python API as people write them: a path as text, one backend alone, a dtype or a device of torch."""

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
    """Convert these arguments before the function is called; one that is None or not given stays so."""

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
    """A path, `~` expanded.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"a path is text or a Path, not {type(value).__name__}", found=repr(value))
    return Path(value).expanduser()


def several(value: Any) -> list[Any]:
    """One backend or probe alone as a list of one; a sequence as a list."""
    return [value] if isinstance(value, (str, BackendRef)) else list(value)


def torch_name(value: object) -> str:
    """The name of a dtype or device: `torch.bfloat16` is `bfloat16`, `torch.device("cuda")` is `cuda`."""
    return str(value).removeprefix("torch.")
