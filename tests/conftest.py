"""One cache for the whole test session: environments and synthetic checkpoints are made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # read when torch is loaded: threads that spin starve their neighbours
import torch

from parity_audit.core.types import Checkpoint
from parity_audit.specs import miniature
from parity_audit.specs.resolve import resolve_model


def pytest_configure() -> None:
    """One thread for each of several test processes, and for the workers that they start.

    Processes that each use every core spend most of their time waiting for each other's threads.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory: the user's, where one is set, else one for all processes of this session."""
    if "PARITY_AUDIT_CACHE" not in os.environ:
        root = tmp_path_factory.getbasetemp()
        together = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
        os.environ["PARITY_AUDIT_CACHE"] = str(together / "cache")
    return Path(os.environ["PARITY_AUDIT_CACHE"])


@pytest.fixture(scope="session")
def gemma(cache: Path) -> Checkpoint:
    """The Gemma-2 miniature."""
    return miniature.make(resolve_model("gemma-2-2b-it"), root=cache / "synthetic")


@pytest.fixture(scope="session")
def llama(cache: Path) -> Checkpoint:
    """The Llama-3.2 miniature."""
    return miniature.make(resolve_model("meta-llama/Llama-3.2-1B"), root=cache / "synthetic")
