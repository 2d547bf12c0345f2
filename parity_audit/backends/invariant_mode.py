"""Apply the setting `batch_invariant=true` of a backend: everything it runs uses batch-invariant kernels."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from parity_audit.core.errors import BackendFailed
from parity_audit.core.types import Description
from parity_audit.core.wire import BATCH_INVARIANT, LoadRequest

TORCH_BACKENDS = ("hf", "hooked_transformer", "transformer_bridge", "nnsight", "python", "spec")
"""Backends whose model torch runs in this process. Engines have their own kernels, which torch's dispatcher cannot replace."""
OWN_SWITCH = ("vllm",)
"""Engines that have their own switch for batch-invariant kernels; their backend sets it."""


class InvariantMode:
    """Replaces torch's kernels at a load, until the next load."""

    def __init__(self, backend_key: str) -> None:
        self.backend_key = backend_key
        self.stack = contextlib.ExitStack()
        self.asked = False

    def taken_from(self, request: LoadRequest) -> LoadRequest:
        """Switch the mode on or off as the request's setting says, and return the request without that setting.

        A backend with its own switch gets the request unchanged, and torch's kernels are not replaced.

        Raises:
            BackendFailed: the backend is an engine whose kernels the mode cannot replace, or the value is neither true nor false.
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
            # Not at the top of the file: it imports torch, and an engine may have to do that itself.
            from parity_audit.batch_invariant.context import invariant

            self.stack.enter_context(invariant())
        return replace(request, settings=settings) if self.asked else request

    def shown(self, about: Description) -> Description:
        """Return the description with the setting's value in force, read from the dispatcher, if the request had the setting."""
        if not self.asked:
            return about
        from parity_audit.batch_invariant.context import is_open

        settings: dict[str, Any] = {**about.settings, BATCH_INVARIANT: is_open()}
        return replace(about, settings=settings)
