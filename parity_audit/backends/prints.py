"""Fingerprints of live parameters, in the checkpoint's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parity_audit.backends.adapters import effective
from parity_audit.backends.paths import get
from parity_audit.core.types import WeightPrint, WeightTap
from parity_audit.core.wire import WeightsRequest
from parity_audit.formulas.fingerprint import fingerprint
from parity_audit.formulas.stored import laid_out


def fingerprints(root: Any, request: WeightsRequest) -> Iterator[WeightPrint]:
    """One fingerprint per tap; a path the model does not have is left out, and the parent reports the gap."""
    for tap in request.taps:
        try:
            value = effective(root, tap.path, get(root, tap.path))
        except LookupError:
            continue
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()  # of a parameter that is cut over ranks, every rank has a part
        if isinstance(value, Tensor):
            yield fingerprint(tap.name, canonical(value, tap))


def canonical(value: Tensor, tap: WeightTap) -> Tensor:
    """The tensor as the checkpoint stores it, on the CPU: sliced, laid out, and, in float32, scaled and shifted back."""
    value = laid_out(value.detach().to("cpu"), tap)
    if tap.scale is not None or tap.shift is not None:
        value = value.to(torch.float32)
    if tap.scale is not None:
        value = value * tap.scale
    if tap.shift is not None:
        value = value + tap.shift
    return value.contiguous()
