"""Messages to and from a worker, with a deadline, and with an eye on the process: a pipe stays open when a forked child
holds it, so the end of the worker is seen by watching the worker."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path
from typing import Any

from parity_audit.core.jsonio import dumps
from parity_audit.workers.processes import Process

WATCH_SECONDS = 0.2
"""How often the process and its log are looked at while nothing arrives."""
CHUNK_BYTES = 1 << 16
MESSAGE_BYTES = 256 << 20
"""More than the fingerprints of a million tensors."""
LOG_BYTES = 1 << 30
"""A log that grows beyond this is a backend that prints without end; it is ended before the disk is full."""


class TimedOut(Exception):
    """No answer before the deadline."""


class Ended(Exception):
    """The process is gone."""


class Garbled(Exception):
    """What arrived, or what the worker printed, is not what a worker says; the message says what it is."""


class Channel:
    """Both ends of the wire that the parent holds."""

    def __init__(self, process: Process, read_fd: int, write_fd: int, log: Path) -> None:
        self.process, self.log = process, log
        self._read_fd, self._write_fd = read_fd, write_fd
        self._pending, self._searched = bytearray(), 0
        os.set_blocking(write_fd, False)

    def close(self) -> None:
        """Close both ends. Safe to call twice."""
        if self._read_fd >= 0:
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = self._write_fd = -1

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """Write one message; a worker that does not read is waited for until the deadline.

        Raises:
            TimedOut, Ended: it was not taken.
        """
        data = memoryview(dumps(message).encode() + b"\n")
        while data:
            self._wait([], [self._write_fd], deadline)
            try:
                data = data[os.write(self._write_fd, data[:CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message.

        Raises:
            TimedOut, Ended: none came.
            Garbled: a line that is not a JSON object, or one without end.
        """
        while (end := self._pending.find(b"\n", self._searched)) < 0:
            self._searched = len(self._pending)
            if self._searched > MESSAGE_BYTES:
                raise Garbled(f"a line of more than {MESSAGE_BYTES >> 20} MiB")
            self._wait([self._read_fd], [], deadline)
            data = os.read(self._read_fd, CHUNK_BYTES)
            if not data:
                raise Ended
            self._pending += data
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        self._searched = 0
        return _message(line)

    def _wait(self, readable: list[int], writable: list[int], deadline: float) -> None:
        """Until one of the descriptors is ready."""
        if self._read_fd < 0:
            raise Ended
        while True:
            gone = self.process.poll() is not None  # looked at first: what it wrote before it ended is still read
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut
            ready = select.select(readable, writable, [], 0 if gone else min(WATCH_SECONDS, left))
            if ready[0] or (ready[1] and not gone):
                return
            if gone:
                raise Ended
            self._look_at_log()

    def _look_at_log(self) -> None:
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES:
            raise Garbled(f"more than {LOG_BYTES >> 30} GiB of prints")


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"{line[:80]!r}, which is not JSON") from error
    if not isinstance(message, dict):
        raise Garbled(f"{line[:80]!r}, which is not a JSON object")
    return message
