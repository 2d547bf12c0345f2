"""Audit a model that the user's own process has loaded, in that process, and leave it as it was.

Hooks are removed after each run, edits are undone, and training mode and TF32 settings are restored. Weights are never
overwritten in place: the object that an edit replaces is kept and put back.
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
    """Runs a model that this process holds, as if it were a port that was just loaded."""

    def __init__(self) -> None:
        self._before: _State | None = None

    def load(self, request: LoadRequest) -> None:
        """Take the model that `LENT` has under the request's target, with its present dtype and device."""
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
    """The training mode of a model's modules and the process's TF32 settings before an audit changes them."""

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
    """The states of torch's random number generators for an audited model, separate from those of the user's process.

    They continue from run to run, as in a separate process, so that two runs of a model that draws random numbers differ. The
    generators of the user's process are unchanged after each run.
    """

    def __init__(self) -> None:
        self.devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        self._save()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Use these generator states inside the block, and save them at its end."""
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
