"""Facts about a running backend: versions, numerics, live values. Nothing here is read from a config."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parity_audit.backends.edits import preview
from parity_audit.backends.paths import NoSuchPath, matches
from parity_audit.core.types import EVERY


def use_exact_float32(*, allow_tf32: bool) -> None:
    """Switch TF32 off, or on if `allow_tf32`. TF32 keeps 10 bits of mantissa although its results have dtype float32."""
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")


def numerics(dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings of torch and of the machine that decide how results are rounded."""
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Run with `count` threads, or with the present number if it is None; yields the number that torch reports."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        if count is not None:
            torch.set_num_threads(before)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, torch and those of these packages that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def effective(root: nn.Module, reads: dict[str, str]) -> dict[str, Any]:
    """Return the live value of each knob, or the list of its values if its path has `[*]`.

    `reads` maps knobs to paths, as the spec gives them. A knob whose path this release does not have is left out.
    """
    found: dict[str, Any] = {}
    for knob, path in reads.items():
        try:
            values = [preview(value) for _, value in matches(root, path)]
        except NoSuchPath:
            continue
        if values:
            found[knob] = values if EVERY in path else values[0]
    return found
