"""Run one step of a diagnosis so that its failure becomes a gap in the report and the other steps go on.

Fits read tensors of programs that may compute anything. Such tensors can break the arithmetic of one fit (an index
beyond an axis, a singular matrix), which says nothing about the other fits. Errors of the audit itself (a capture that
cannot be read, no memory, Ctrl-C) are raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, Union

import torch

from parity_audit.core.errors import ParityError, raised_at
from parity_audit.core.types import NotTested

T = TypeVar("T")


def attempt(what: str, step: Callable[[], T]) -> Union[T, NotTested]:
    """Return the result of `step`, or a `NotTested` with the error and the line that raised it.

    Raises:
        ParityError, MemoryError: as `step` does, `torch.OutOfMemoryError` included.
    """
    try:
        return step()
    except (ParityError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return NotTested(what=what, why=f"broke off with {type(error).__name__} at {raised_at(error)}: {error}")
