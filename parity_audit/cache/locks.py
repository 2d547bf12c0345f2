"""Locks on files of the cache. The kernel lets go of them when their process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lock:
    """A lock that is held until `release`, or until the process ends. Other processes wait, or look elsewhere."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def hold(path: Path, *, shared: bool = False) -> Lock:
    """Take the lock, waiting for whoever has it. A `shared` one is held by any number, but not beside an exclusive one."""
    lock = _taken(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    assert lock is not None
    return lock


def hold_if_free(path: Path) -> Lock | None:
    """Take the lock for oneself alone, or None when somebody has it."""
    return _taken(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock for one block."""
    lock = hold(path)
    try:
        yield
    finally:
        lock.release()


def _taken(path: Path, how: int) -> Lock | None:
    """Open and lock. A file that was deleted while we waited for it locks nothing: open the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, how)
            if _is(path, descriptor):
                return Lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
