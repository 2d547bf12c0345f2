"""Which build of torch is wanted, by uv's options; standard library only, since `install.py` asks before anything is installed.

On Linux the ordinary torch is a CUDA build of several gigabytes. It is never installed for the CPU: a wheel at hand or an index
that has CPU builds serves, or else uv's own index of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable

CUDA_PACKAGES = ("nvidia-", "cuda-")
DRIVER_QUERIES = "nvidia-ml-py"
"""Asks the driver questions, is pure Python, and says nothing about the build of torch beside it."""
BACKEND = "--torch-backend"


def torch_options(device: str) -> tuple[tuple[str, ...], ...]:
    """uv's options to try in turn; UV_TORCH_BACKEND, where the user set it, decides by itself.

    For the CPU: the wheels and indexes that are set up, then the index of CPU builds. For CUDA: the build for this machine's
    driver, then the ordinary one.
    """
    if "UV_TORCH_BACKEND" in os.environ:
        return ((),)
    return ((), (BACKEND, "cpu")) if device == "cpu" else ((BACKEND, "auto"), ())


def is_for(device: str, packages: Iterable[tuple[str, str]]) -> bool:
    """Whether the torch among these (name, version) is built for a device; a CUDA build says so, or brings CUDA's libraries."""
    cuda = any(
        (name.startswith(CUDA_PACKAGES) and name != DRIVER_QUERIES) or (name == "torch" and "+cu" in version)
        for name, version in packages
    )
    return "UV_TORCH_BACKEND" in os.environ or cuda == (device == "cuda")


def cuda_answers() -> bool:
    """Whether this machine has a CUDA device that answers."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
