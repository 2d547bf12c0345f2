"""Run uv: with the local wheels that pip would find as well, and with what it printed when it fails."""

from __future__ import annotations

import os
import subprocess

from parity_audit.core.errors import EnvFailed

LINES_SHOWN = 12


def run_uv(*args: str, what: str, text: str = "", downloads: bool = True) -> str:
    """What uv prints for these arguments, with `text` on its standard input.

    `downloads`: uv may fetch an interpreter. Resolving needs none, only its version.

    Raises:
        EnvFailed: uv ended with an error; the message begins with `what` and holds its last lines.
    """
    from uv import find_uv_bin

    more = {} if downloads else {"UV_PYTHON_DOWNLOADS": "manual"}
    return run([find_uv_bin(), *args], what, text=text, more=more)


def run(command: list[str], what: str, *, text: str = "", more: dict[str, str] | None = None) -> str:
    """Standard output of a command. Raises EnvFailed as `run_uv` does."""
    environ = {**os.environ, **(more or {})}
    if "PIP_FIND_LINKS" in environ:
        environ.setdefault("UV_FIND_LINKS", environ["PIP_FIND_LINKS"])
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environ, capture_output=True, text=True, input=text)
    if done.returncode != 0:
        last = "\n".join(f"    {line}" for line in (done.stderr or done.stdout).strip().splitlines()[-LINES_SHOWN:])
        raise EnvFailed(
            what, found="\n" + last, hint="try another version; `parity-audit envs list` shows the tested ones"
        )
    return done.stdout
