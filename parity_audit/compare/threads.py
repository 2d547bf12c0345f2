"""Use one thread for work that consists of small operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread in this context.

    For thousands of small operations on a busy machine, threads that wait for each other cost a hundred times the work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
