"""Live weights of vLLM modules, also where the CPU engine has packed them away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends.paths import get
from parity_audit.backends.prints import canonical, fingerprint
from parity_audit.core.types import WeightPrint
from parity_audit.core.wire import WeightsRequest

IDENTITY_ROWS = 512


def fingerprints(model: nn.Module, request: WeightsRequest) -> Iterator[WeightPrint]:
    """One fingerprint per tap; a path the model does not have is left out. Taps of one module share its unpacking."""
    path, value = "", torch.empty(0)
    for tap in request.taps:
        if tap.path != path:
            try:
                path, value = tap.path, live_weight(model, tap.path)
            except LookupError:
                continue
        yield fingerprint(tap.name, canonical(value, tap))


def live_weight(model: nn.Module, path: str) -> Tensor:
    """The parameter at `path` as the engine uses it.

    The CPU engine packs a linear layer's weight for oneDNN and drops the parameter. What the layer makes of
    the identity is then its weight, exactly: every output is one weight times one, plus zeros.
    """
    value: Tensor = get(model, path)
    if value.numel():
        return value
    layer = get(model, path.rpartition(".")[0])
    return unpacked(layer, value.dtype)


def unpacked(layer: Any, dtype: torch.dtype) -> Tensor:
    """The packed weight `[out, in]` of one linear layer."""
    width = shape_of(layer)[1]
    eye = torch.eye(width, dtype=dtype)
    rows = [layer.cpu_linear(part.contiguous(), layer.weight, None) for part in eye.split(IDENTITY_ROWS)]
    return torch.cat(rows).T.contiguous()


def shape_of(layer: Any) -> tuple[int, int]:
    """`(out, in)` of a linear layer, of this rank's part."""
    out = getattr(layer, "output_size_per_partition", None) or layer.output_size
    return out, getattr(layer, "input_size_per_partition", None) or layer.input_size


def parameter_count(model: nn.Module) -> int:
    """Number of parameters: the packed ones included, the padding of the vocabulary not."""
    packed = (module for module in model.modules() if hasattr(module, "cpu_linear") and not module.weight.numel())
    sizes = (shape_of(module) for module in packed)
    held = sum(parameter.numel() for parameter in model.parameters())
    return held + sum(out * width for out, width in sizes) - _vocabulary_padding(model)


def _vocabulary_padding(model: nn.Module) -> int:
    """Entries of the rows that vLLM adds to (un)embeddings; a tied pair shares one parameter."""
    padded = [module for module in model.modules() if hasattr(module, "org_vocab_size") and hasattr(module, "weight")]
    unique = {id(module.weight): module for module in padded}
    return sum((len(module.weight) - module.org_vocab_size) * module.weight.shape[1] for module in unique.values())
