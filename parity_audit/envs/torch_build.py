"""The options with which uv installs the right build of torch for a device.

This module uses only the standard library, because `install.py` needs it before anything is installed. On Linux the
ordinary torch is a CUDA build of several gigabytes. It is never installed for the CPU: a local wheel or a configured
index with CPU builds is used, or else uv's own index of CPU builds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable

CUDA_PACKAGES = ("nvidia-", "cuda-")
DRIVER_QUERIES = "nvidia-ml-py"
"""A pure Python package that queries the driver. Its presence says nothing about the build of torch."""
BACKEND = "--torch-backend"


def torch_options(device: str) -> tuple[tuple[str, ...], ...]:
    """Return the options of uv to try in turn; none if the user has set UV_TORCH_BACKEND, which then decides.

    For the CPU, these are first the configured wheels and indexes, then uv's index of CPU builds. For CUDA, these are
    first the build for this machine's driver, then the ordinary build.
    """
    if "UV_TORCH_BACKEND" in os.environ:
        return ((),)
    return ((), (BACKEND, "cpu")) if device == "cpu" else ((BACKEND, "auto"), ())


def is_for(device: str, packages: Iterable[tuple[str, str]]) -> bool:
    """Return whether the torch among these (name, version) pairs is built for a device.

    A CUDA build is recognised by its version, or by CUDA libraries among the packages. If the user has set
    UV_TORCH_BACKEND, every build is accepted.
    """
    cuda = any(
        (name.startswith(CUDA_PACKAGES) and name != DRIVER_QUERIES) or (name == "torch" and "+cu" in version)
        for name, version in packages
    )
    return "UV_TORCH_BACKEND" in os.environ or cuda == (device == "cuda")


def cuda_answers() -> bool:
    """Return whether this machine has a working CUDA device, according to nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
