"""A port that is free now, and that no connection takes by itself."""

from __future__ import annotations

import socket

import pytest

from parity_audit.backends import free_port
from parity_audit.backends.free_port import LOCALHOST


def test_a_port_that_is_taken_is_not_chosen(monkeypatch):
    with socket.socket() as taken:
        taken.bind((LOCALHOST, free_port.free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(free_port, "CHOSEN_FROM", range(port, port + 1))

        with pytest.raises(OSError, match=f"no free port among 100 from {port} to {port}"):
            free_port.free_port()

    assert free_port.free_port() == port


def test_connections_are_given_none_of_these_ports():
    """By the system's own account, where it gives one (Linux)."""
    with socket.socket() as one:
        one.bind((LOCALHOST, 0))

        assert one.getsockname()[1] not in free_port.CHOSEN_FROM
