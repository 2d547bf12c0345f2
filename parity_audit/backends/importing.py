"""Imports of an engine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import without looking for garbage, now and ever after among what was imported: there is next to none, and looking takes a
    fifth of a worker's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
