"""Environments of their own with parity-audit in them, as users have them, and commands run there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from parity_audit.envs.uv import run_uv

ROOT = Path(__file__).parents[1]


def installed(home: Path, constraints: Path, *wanted: str) -> Path:
    """The interpreter of a new environment with this parity-audit and what is wanted beside it."""
    what = f"parity-audit cannot be installed beside {', '.join(wanted)}"
    python = home / "bin" / "python"
    run_uv("venv", "--quiet", "--python", "3.11", str(home), what=what)
    run_uv(
        "pip", "install", "--quiet", "--python", str(python), "--constraint", str(constraints), *wanted, "-e", str(ROOT),
        what=what,
    )  # fmt: skip
    return python


def ran(python: Path, cwd: Path, *command: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """A command of such an environment; nothing of the one that runs the tests is in its path."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([python, *command], cwd=cwd, env=environ, input=given, capture_output=True, text=True)
