"""One step of a diagnosis that fails is a gap in the report; the other steps go on.

Fits read tensors of programs that may compute anything. What a program shows can break the arithmetic of a fit (an index
beyond an axis, a singular matrix), and says nothing about the fits beside it. Errors of the audit itself (a capture that
cannot be read, no memory, Ctrl-C) are not of this kind and are raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, Union

import torch

from parity_audit.core.errors import ParityError, raised_at
from parity_audit.core.types import NotTested

T = TypeVar("T")


def attempt(what: str, step: Callable[[], T]) -> Union[T, NotTested]:
    """The result of `step`, or what could not be done, with the error and the line that raised it.

    Raises:
        ParityError, MemoryError: as `step` does.
    """
    try:
        return step()
    except (ParityError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return NotTested(what=what, why=f"broke off with {type(error).__name__} at {raised_at(error)}: {error}")
