"""A model that the user's own process has loaded: run where it is, and left as it was.

Hooks are set for one run and taken away again, edits are undone, training mode and TF32 are put back. Weights are never
written; what an edit replaces is kept and put back as the same object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from parity_audit.backends.facts import use_exact_float32
from parity_audit.backends.python_port import PythonPort
from parity_audit.backends.wrappers import unwrapped
from parity_audit.core.wire import ApplyRequest, LoadRequest

LENT: dict[str, Any] = {}
"""The models of this process that are being audited, by the `target` of their BackendRef."""


class LiveModel(PythonPort):
    """Runs a model of this process as a port that has just been loaded."""

    def __init__(self) -> None:
        self._before: _State | None = None

    def load(self, request: LoadRequest) -> None:
        """Take the model that was lent under this target; in its own dtype, on its own device."""
        model = unwrapped(LENT[str(request.target)])
        self._before = _State(model)
        use_exact_float32(allow_tf32=bool(request.settings.get("tf32", False)))
        self.take(model, request)

    def close(self) -> None:
        """Undo every edit and put back what `load` changed. Safe to call twice."""
        before, self._before = self._before, None
        if before is not None:
            if hasattr(self, "inner"):
                self.inner.apply(ApplyRequest(edits=()))
            before.restore()


class _State:
    """What an audit changes of a model and of the process, as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.training = [(module, module.training) for module in model.modules()]
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        self.tf32 = (cuda.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision())

    def restore(self) -> None:
        for module, training in self.training:
            module.training = training
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.tf32[:2]
        torch.set_float32_matmul_precision(self.tf32[2])


class RandomNumbers:
    """What an audited model draws: its numbers go on from run to run, as they do in a process of its own, so that two runs of a
    model that draws any differ; the generators of this process stay where they were."""

    def __init__(self) -> None:
        self.devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        self._save()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Draw from these numbers within the block."""
        with torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                yield
            finally:
                self._save()

    def _save(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
