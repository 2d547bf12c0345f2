"""Run uv with the local wheels that pip would also find (PIP_FIND_LINKS); an error contains the last lines that uv printed."""

from __future__ import annotations

import os
import subprocess

from parity_audit.core.errors import EnvFailed

LINES_SHOWN = 12


def run_uv(*args: str, what: str, text: str = "", downloads: bool = True) -> str:
    """Run uv with these arguments and return its standard output.

    Args:
        what: the beginning of the error message.
        text: the standard input of uv.
        downloads: whether uv may download an interpreter. Resolving needs only the interpreter's version.

    Raises:
        EnvFailed: uv ended with an error; the message begins with `what` and contains uv's last lines.
    """
    from uv import find_uv_bin

    more = {} if downloads else {"UV_PYTHON_DOWNLOADS": "manual"}
    return run([find_uv_bin(), *args], what, text=text, more=more)


def run(command: list[str], what: str, *, text: str = "", more: dict[str, str] | None = None) -> str:
    """Run a command and return its standard output. Raises EnvFailed as `run_uv` does."""
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
