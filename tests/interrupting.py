"""Processes that a test interrupts."""

from __future__ import annotations

import signal


def obey_ctrl_c() -> None:
    """Run in a child before its program: a child of a job in the background is born deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
