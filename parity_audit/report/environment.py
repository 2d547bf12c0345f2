"""Facts about the machine for the report: enough to decide whether two reports may be compared."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from parity_audit.core.version import __version__

PACKAGES = ("torch", "transformers", "transformer-lens", "numpy", "safetensors", "einops")
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE")


def this_machine() -> dict[str, Any]:
    """Return the program, date (UTC), interpreter, packages of the main environment, processor, memory and some variables.

    Host name, user and paths are left out.
    """
    return {
        "parity_audit": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    return _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _memory() -> int | None:
    text = _field(Path("/proc/meminfo"), "MemTotal")
    return int(text.split()[0]) * 1024 if text else None


def _field(path: Path, name: str) -> str | None:
    """Return the value of the first `name : value` line of a /proc file; None if there is no such file or line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
