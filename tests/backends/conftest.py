"""A transformers backend on a local copy of a miniature, as a user with a folder of weights has it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parity_audit.backends.hf import HfBackend
from parity_audit.core.types import Checkpoint
from parity_audit.core.wire import LoadRequest

sys.path.insert(0, str((Path(__file__).parent / "../specs").resolve()))  # the architectures of the specs' tests


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Checkpoint], HfBackend]:
    """Loads a checkpoint in float32 on the CPU."""

    def load(checkpoint: Checkpoint) -> HfBackend:
        folder = shutil.copytree(checkpoint.path, tmp_path_factory.mktemp("local") / "model")
        backend = HfBackend()
        backend.load(
            LoadRequest(checkpoint=Checkpoint(repo_id="local", path=str(folder)), dtype="float32", device="cpu")
        )
        return backend

    return load
