"""Processes that a test interrupts, and whether they have ended."""

from __future__ import annotations

import signal
from pathlib import Path


def obey_ctrl_c() -> None:
    """Run in a child before its program: a child of a job in the background is born deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def is_alive(pid: int) -> bool:
    """Whether there is such a process and it has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
