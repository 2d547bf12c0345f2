"""The hub library's exceptions, for every release of it."""

from __future__ import annotations

import importlib
from typing import Any


def exceptions() -> Any:
    """The module that has them: `huggingface_hub.errors` of 0.24 lacks most of them."""
    return importlib.import_module("huggingface_hub.utils")
