"""The placement of a transformers model's parts on devices: `device_map`, which accelerate carries out."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from parity_audit.core.wire import DEVICE_MAP, MAX_MEMORY, OFFLOAD_FOLDER, PLACES, LoadRequest

PLACED = "placed"
CPU = "cpu"


class Placement:
    """The loader's arguments that place one model.

    If a device map is asked for without a folder, `scratch` is a temporary folder for the offloaded weights. It is deleted
    together with this object.
    """

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

            # The request is for the CPU, so accelerate must not use the GPU that it would find.
            self.how[MAX_MEMORY] = {CPU: psutil.virtual_memory().available}

    @property
    def asked(self) -> bool:
        """Whether a device map was asked for."""
        return DEVICE_MAP in self.how


def parts_per_device(model: Any) -> dict[str, dict[str, int]]:
    """Return the number of parts of the device map on each device; empty if the model has no device map."""
    chosen: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    return {PLACED: dict(Counter(str(place) for place in chosen.values()))} if chosen else {}


def _device(key: str) -> int | str:
    """Return a key of `max_memory` as accelerate expects it: the numbers of GPUs as integers, which JSON has as text."""
    return int(key) if key.isdigit() else key
