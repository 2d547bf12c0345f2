"""parity-audit: is a model port computing the same function as its reference?

Importing this package costs nothing: everything heavy is loaded on first use, so that
`parity_audit.core` also imports on a bare interpreter inside a backend's own environment.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from parity_audit.core.version import __version__

__all__ = ["__version__", "audit", "capture", "diff"]

if TYPE_CHECKING:
    from parity_audit.api import audit, capture, diff


class _Package(ModuleType):
    """Imported subpackages that are named like a function of the API (`audit`, `capture`) do not hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in __all__:
        from parity_audit import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
