"""A worker without a process of its own: it sends the requests to a model that this process has loaded.

Its answers are converted to plain data and back, like those of a worker process, so that callers need not distinguish
the two.
"""

from __future__ import annotations

import json
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from parity_audit.backends.live import LENT, LiveModel, RandomNumbers
from parity_audit.backends.serve import Server, explained
from parity_audit.backends.wrappers import unwrapped
from parity_audit.core.backend_ref import LIVE
from parity_audit.core.errors import BackendFailed, ParityError, UsageError
from parity_audit.core.jsonio import dumps, to_plain
from parity_audit.core.types import BackendRef
from parity_audit.core.wire import LoadRequest
from parity_audit.workers.asking import BackendClient, OnProgress
from parity_audit.workers.client import backend_failed

KEY = "parity_audit.backends.live:LiveModel"


def facts_of(model: Any) -> dict[str, str]:
    """Return the dtype and the device of a model's parameters.

    Raises:
        UsageError: the object is no model with parameters, or they are on several devices or on the meta device.
    """
    inner = unwrapped(model)
    parameters = list(inner.parameters()) if isinstance(inner, nn.Module) else []
    if not parameters:
        raise UsageError(
            f"a {type(model).__module__}.{type(model).__qualname__} is no loaded model", code="live-model",
            expected="a transformers, TransformerLens or nnsight model, or another nn.Module that has parameters",
        )  # fmt: skip
    devices = sorted({parameter.device.type for parameter in parameters})
    if len(devices) > 1 or devices == ["meta"]:
        raise UsageError(
            f"the model's parameters are on {' and '.join(devices)}", code="live-model",
            hint="load it whole onto one device (without device_map, offloading or meta tensors; in nnsight with dispatch=True)",
        )  # fmt: skip
    return {"dtype": str(parameters[0].dtype).removeprefix("torch."), "device": devices[0]}


@contextmanager
def lent(model: Any, **settings: Any) -> Iterator[BackendRef]:
    """Provide a candidate that refers to a loaded model, until the end of the `with` block.

    Args:
        model: what transformers, TransformerLens or nnsight returned, or any `nn.Module` with a site map in `settings`.
    """
    target = f"{type(model).__name__}-{uuid.uuid4().hex[:12]}"
    LENT[target] = model
    try:
        yield BackendRef(name=LIVE, target=target, settings=settings)
    finally:
        del LENT[target]


class LiveWorker(BackendClient):
    """A worker that runs in this process. `kill` restores the model to its earlier state."""

    def __init__(self, label: str, log: Path) -> None:
        self.label, self.log = label, log
        self._server = Server(KEY, replies=None)
        self._numbers = RandomNumbers()

    def prepare(self, request: LoadRequest) -> None:
        """Do nothing, because the model is already loaded."""

    def call(self, op: str, args: Any, *, on_progress: OnProgress | None = None) -> Any:
        """Run a request and return its answer as plain data, as in `Asking.call`.

        An exception from the model is a failure of the candidate; a KeyboardInterrupt (Ctrl-C) is passed on.

        Raises:
            BackendFailed: the model raised an exception.
        """

        def tell(text: str, done: int | None = None, total: int | None = None) -> None:
            if on_progress is not None:
                on_progress(text=text, done=done, total=total)

        try:
            with self._numbers.apart():
                result = self._server.do(op, json.loads(dumps(to_plain(args))), tell)
            return json.loads(dumps(to_plain(result)))
        except Exception as error:
            trace = traceback.format_exc()
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("a", encoding="utf-8") as log:
                log.write(trace)
            raise backend_failed(self.label, op, explained(error, trace), self.log) from error

    def kill(self) -> None:
        """Restore the model to its state before the audit."""
        backend = self._server.backend
        if isinstance(backend, LiveModel):
            backend.close()

    def _bad(self, op: str, what: str) -> ParityError:
        self.kill()
        return BackendFailed(f"{self.label} {what} during `{op}`", where=str(self.log))
