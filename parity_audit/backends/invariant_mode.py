"""The setting `batch_invariant=true` of a backend: the batch-invariant kernels are in force for whatever it runs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from parity_audit.core.errors import BackendFailed
from parity_audit.core.types import Description
from parity_audit.core.wire import BATCH_INVARIANT, LoadRequest

TORCH_BACKENDS = ("hf", "hooked_transformer", "transformer_bridge", "nnsight", "python", "spec")
"""Backends whose model is run by torch in this process. Engines have kernels of their own, which torch's dispatcher does not see."""
OWN_SWITCH = ("vllm",)
"""Engines with a switch of their own, which their backend turns."""


class InvariantMode:
    """Kernels that stay replaced from one load to the next."""

    def __init__(self, backend_key: str) -> None:
        self.backend_key = backend_key
        self.stack = contextlib.ExitStack()
        self.asked = False

    def taken_from(self, request: LoadRequest) -> LoadRequest:
        """The request without the setting; the mode is in force afterwards as the setting says.

        Raises:
            BackendFailed: an engine, which the mode does not reach, or a value that is no yes or no.
        """
        settings = dict(request.settings)
        wanted = settings.pop(BATCH_INVARIANT, False)
        self.stack.close()
        self.asked = BATCH_INVARIANT in request.settings
        if not isinstance(wanted, bool):
            raise BackendFailed(f"`{BATCH_INVARIANT}={wanted}` is neither true nor false")
        if self.backend_key in OWN_SWITCH:
            self.asked = False
            return request
        if wanted and self.backend_key not in TORCH_BACKENDS:
            raise BackendFailed(
                f"`{BATCH_INVARIANT}` replaces kernels of torch and does not reach those of `{self.backend_key}`; an engine's "
                "own switch, where it has one for this device, is the engine's to set",
            )
        if wanted:
            from parity_audit.batch_invariant.context import (
                invariant,
            )  # imports torch, which an engine may want to do itself

            self.stack.enter_context(invariant())
        return replace(request, settings=settings) if self.asked else request

    def shown(self, about: Description) -> Description:
        """What the backend says of itself, and whether the kernels are replaced now: read from the dispatcher's state."""
        if not self.asked:
            return about
        from parity_audit.batch_invariant.context import is_open

        settings: dict[str, Any] = {**about.settings, BATCH_INVARIANT: is_open()}
        return replace(about, settings=settings)
