"""Prevent a worker from changing its environment: it must not start a program that installs packages.

TransformerLens 4 runs `uv pip install torchvision` when it loads a model of images and text whose processor it cannot make. This
would replace torch in the environment in which everything else is measured.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

INSTALLERS = ("pip", "pip3", "uv", "conda", "mamba", "micromamba")
CHANGES = ("install", "uninstall", "add", "remove", "sync", "update", "upgrade")


def refuse_installs() -> None:
    """From now on until this process ends, make every attempt to start such a program raise PermissionError."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.system"):
        return
    given = args[1] if event == "subprocess.Popen" else args[0]
    words = _words(given)
    if installs(words):
        raise PermissionError(f"an audit changes no environment: `{' '.join(words)}` was not run")


def installs(words: Sequence[str]) -> bool:
    """Whether a command line installs, updates or removes packages."""
    programs = {os.path.basename(word) for word in words}
    return any(name in programs for name in INSTALLERS) and any(word in CHANGES for word in words)


def _words(given: Any) -> list[str]:
    if isinstance(given, (list, tuple)):
        return [word for part in given for word in _words(part)]
    text = os.fsdecode(given) if isinstance(given, (str, bytes, os.PathLike)) else str(given)
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
