"""Send messages to a worker and receive them, with a deadline, while watching the worker's process.

The end of a worker cannot be recognised from the pipe, which stays open if a forked child still has it.
"""

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
"""The interval at which the process and its log are checked while no message arrives."""
CHUNK_BYTES = 1 << 16
MESSAGE_BYTES = 256 << 20
"""The longest message: more than the fingerprints of a million tensors need."""
LOG_BYTES = 1 << 30
"""The largest log. A backend that prints more probably never stops, so it is ended before the disk is full."""


class TimedOut(Exception):
    """There was no answer before the deadline."""


class Ended(Exception):
    """The worker's process has ended, or the channel is closed."""


class Garbled(Exception):
    """The worker sent something that is not a valid message, or printed too much; the message of this error describes it."""


class Channel:
    """The parent's two ends of the pipes to and from a worker."""

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
        """Send one message; wait until the deadline for a worker that does not read.

        Raises:
            TimedOut, Ended: the message could not be sent.
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
        """Wait for the next message and return it.

        Raises:
            TimedOut, Ended: no message came.
            Garbled: a line is not a JSON object or is longer than `MESSAGE_BYTES`, or the log is larger than
                `LOG_BYTES`.
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
        """Wait until one of the descriptors is ready. Raises TimedOut, Ended or Garbled."""
        if self._read_fd < 0:
            raise Ended
        while True:
            gone = self.process.poll() is not None  # checked before `select`, so that its last messages are still read
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
