"""Locks on files of the cache. The kernel releases a lock when its process ends, for whatever reason."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Lock:
    """A lock that this process holds until `release`, or until the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def hold(path: Path, *, shared: bool = False) -> Lock:
    """Wait until the lock is free and take it. Any number of holders may have a `shared` lock, but not beside an exclusive one."""
    lock = _taken(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    assert lock is not None
    return lock


def hold_if_free(path: Path) -> Lock | None:
    """Take an exclusive lock and return it; None if any other holder has the lock."""
    return _taken(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock during a `with` block."""
    lock = hold(path)
    try:
        yield
    finally:
        lock.release()


def _taken(path: Path, how: int) -> Lock | None:
    """Open a file and lock it; None if `how` does not allow waiting and the lock is not free.

    If the file was deleted while this process waited, the lock has no effect; the new file of this name is then opened
    and locked.
    """
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
