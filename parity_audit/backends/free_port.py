"""A port of this machine for a server that starts later."""

from __future__ import annotations

import random
import socket

LOCALHOST = "127.0.0.1"
CHOSEN_FROM = range(20000, 32768)
"""Below the ports that Linux gives to connections by itself (32768 to 60999), and other systems from 49152 on. An engine binds its
port half a minute after it was chosen: a connection may have taken one of those meanwhile."""
TRIES = 100


def free_port() -> int:
    """A port on which nobody listens.

    Raises:
        OSError: none of `TRIES` ports was free.
    """
    draw = random.SystemRandom()  # every process draws its own
    for _ in range(TRIES):
        port = draw.choice(CHOSEN_FROM)
        with socket.socket() as one:
            try:
                one.bind((LOCALHOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {TRIES} from {CHOSEN_FROM.start} to {CHOSEN_FROM.stop - 1}")
