"""Choose a TCP port of this machine for a server that starts later."""

from __future__ import annotations

import random
import socket

LOCALHOST = "127.0.0.1"
CHOSEN_FROM = range(20000, 32768)
"""The range that ports are chosen from.

It is below the ports that the system assigns to outgoing connections: 32768 to 60999 on Linux, 49152 and above on other systems.
An engine binds its port half a minute after it was chosen, and a connection could take a port of that range meanwhile."""
TRIES = 100


def free_port() -> int:
    """Return a port that no process has bound.

    Raises:
        OSError: none of `TRIES` ports was free.
    """
    draw = random.SystemRandom()  # independent of seeds and forks, so that processes draw different ports
    for _ in range(TRIES):
        port = draw.choice(CHOSEN_FROM)
        with socket.socket() as one:
            try:
                one.bind((LOCALHOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {TRIES} from {CHOSEN_FROM.start} to {CHOSEN_FROM.stop - 1}")
