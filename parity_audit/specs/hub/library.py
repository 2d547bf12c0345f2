"""Find the exceptions of the hub library in all supported releases."""

from __future__ import annotations

import importlib
from typing import Any


def exceptions() -> Any:
    """Return the module that has the hub library's exceptions; in 0.24, `huggingface_hub.errors` lacks most of them."""
    return importlib.import_module("huggingface_hub.utils")
