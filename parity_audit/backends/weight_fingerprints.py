"""Fingerprints of live parameters, in the checkpoint's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity_audit.backends.adapters import weight_with_adapters
from parity_audit.backends.paths import get
from parity_audit.core.types import WeightPrint, WeightTap
from parity_audit.core.wire import WeightsRequest
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.formulas.stored import laid_out


def fingerprints(root: Any, request: WeightsRequest) -> Iterator[WeightPrint]:
    """Yield one fingerprint per tap. A path that the model does not have is left out; the parent process reports it."""
    for tap in request.taps:
        try:
            value = weight_with_adapters(root, tap.path, get(root, tap.path))
        except LookupError:
            continue
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()  # the parameter is split over ranks, so that each rank has only a part
        if isinstance(value, Tensor):
            yield fingerprint(tap.name, canonical(value, tap))


def canonical(value: Tensor, tap: WeightTap) -> Tensor:
    """Return the tensor in the checkpoint's layout, on the CPU: sliced and rearranged, then scaled and shifted.

    Scaling and shifting, if the tap asks for them, are done in float32.
    """
    value = laid_out(value.detach().to("cpu"), tap)
    if tap.scale is not None or tap.shift is not None:
        value = value.to(torch.float32)
    if tap.scale is not None:
        value = value * tap.scale
    if tap.shift is not None:
        value = value + tap.shift
    return value.contiguous()
