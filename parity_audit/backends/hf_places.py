"""Where transformers puts the parts of a model: `device_map`, as accelerate carries it out."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from parity_audit.core.wire import DEVICE_MAP, MAX_MEMORY, OFFLOAD_FOLDER, PLACES, LoadRequest

PLACED = "placed"
CPU = "cpu"


class Places:
    """The loader's arguments for one model; `scratch` holds what is offloaded, as long as this object lives."""

    def __init__(self, request: LoadRequest) -> None:
        self.how = {key: request.settings[key] for key in PLACES if request.settings.get(key) is not None}
        self.scratch: tempfile.TemporaryDirectory[str] | None = None
        if not self.asked:
            return
        if OFFLOAD_FOLDER not in self.how:
            self.scratch = tempfile.TemporaryDirectory(prefix="parity-audit-offload-")
            self.how[OFFLOAD_FOLDER] = self.scratch.name
        if MAX_MEMORY in self.how:
            self.how[MAX_MEMORY] = {_device(key): room for key, room in self.how[MAX_MEMORY].items()}
        elif request.device == CPU and torch.cuda.is_available() and isinstance(self.how[DEVICE_MAP], str):
            import psutil  # accelerate needs it too

            self.how[MAX_MEMORY] = {CPU: psutil.virtual_memory().available}  # no GPU was asked for

    @property
    def asked(self) -> bool:
        """Whether a device map was asked for."""
        return DEVICE_MAP in self.how


def placed(model: Any) -> dict[str, dict[str, int]]:
    """How many parts of the map lie on which device; nothing where all of the model is in one place."""
    chosen: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    return {PLACED: dict(Counter(str(place) for place in chosen.values()))} if chosen else {}


def _device(key: str) -> int | str:
    """GPUs are numbered, and the keys of JSON are text."""
    return int(key) if key.isdigit() else key
