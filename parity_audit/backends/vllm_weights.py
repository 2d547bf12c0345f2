"""Live weights of vLLM modules, including weights that the CPU engine has packed into another format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from parity_audit.backends.paths import get
from parity_audit.backends.weight_fingerprints import canonical
from parity_audit.core.types import WeightPrint
from parity_audit.core.wire import WeightsRequest
from parity_audit.formulas.fingerprint import fingerprint

IDENTITY_ROWS = 512
"""Rows of the identity matrix that a packed layer is applied to at a time."""
BASE = 256
"""Base of the digits in which entries are numbered: every whole number below it is exact in bfloat16."""


def fingerprints(model: nn.Module, request: WeightsRequest) -> Iterator[WeightPrint]:
    """Yield one fingerprint per tap, without taps whose path the model does not have.

    Consecutive taps with the same path share one unpacked weight.
    """
    path, value = "", torch.empty(0)
    for tap in request.taps:
        if tap.path != path:
            try:
                path, value = tap.path, live_weight(model, tap.path)
            except LookupError:
                continue
        yield fingerprint(tap.name, canonical(value, tap))


def live_weight(model: nn.Module, path: str) -> Tensor:
    """Return the parameter at `path` as the engine uses it, unpacked if the engine has packed it.

    The CPU engine packs the weight of a linear layer for oneDNN and drops the parameter. The layer applied to the
    identity matrix then gives the exact weight, since every output is one weight times one, plus zeros.
    """
    value: Tensor = get(model, path)
    if value.numel():
        isa = _packed_for(model, path)
        return value if isa is None else unpacked_experts(value, isa)
    layer = get(model, path.rpartition(".")[0])
    return unpacked(layer, value.dtype)


def _packed_for(model: nn.Module, path: str) -> str | None:
    """Return the instruction set for which an expert weight was packed, None if the weight is as it was loaded."""
    owner, _, leaf = path.rpartition(".")
    if not leaf.partition("[")[0].endswith("weight"):
        return None
    method = getattr(get(model, owner) if owner else model, "quant_method", None)
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return None if getattr(experts, "_use_zentorch", True) else getattr(experts, "isa", None)


def unpacked_experts(packed: Tensor, isa: str) -> Tensor:
    """Return packed expert weights `[out, in]` or `[expert, out, in]` in the order in which they were loaded."""
    order = _order(tuple(packed.shape[-2:]), packed.dtype, isa)
    flat = packed.reshape(-1, order.numel())
    out = torch.empty_like(flat)
    out[:, order] = flat
    return out.view(packed.shape)


@cache
def _order(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> Tensor:
    """Return, for each packed entry, its position before packing, found by packing a tensor of numbered entries.

    The numbers are packed one digit (base `BASE`) at a time, because 16-bit dtypes cannot hold large whole numbers.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers, order, power = torch.arange(shape[0] * shape[1]), torch.zeros(shape[0] * shape[1], dtype=torch.long), 1
    while power < numbers.numel():
        digit = (numbers // power % BASE).to(dtype).view(1, *shape)
        order += cpu_prepack_moe_weight(digit.contiguous(), isa).flatten().long() * power
        power *= BASE
    return order


def unpacked(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight `[out, in]` of a packed linear layer, by applying the layer to the identity matrix."""
    width = shape_of(layer)[1]
    eye = torch.eye(width, dtype=dtype)
    rows = [layer.cpu_linear(part.contiguous(), layer.weight, None) for part in eye.split(IDENTITY_ROWS)]
    return torch.cat(rows).T.contiguous()


def shape_of(layer: Any) -> tuple[int, int]:
    """Return `(out, in)` of this rank's part of a linear layer."""
    out = getattr(layer, "output_size_per_partition", None) or layer.output_size
    return out, getattr(layer, "input_size_per_partition", None) or layer.input_size


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters, including packed ones and without the padding of the vocabulary."""
    modules: list[Any] = list(model.modules())
    packed = (module for module in modules if hasattr(module, "cpu_linear") and not module.weight.numel())
    sizes = (shape_of(module) for module in packed)
    held = sum(parameter.numel() for parameter in model.parameters())
    return held + sum(out * width for out, width in sizes) - _vocabulary_padding(model)


def _vocabulary_padding(model: nn.Module) -> int:
    """Return how many entries vLLM adds to (un)embeddings as padding; the shared parameter of a tied pair counts once."""
    modules: list[Any] = list(model.modules())
    padded = [module for module in modules if hasattr(module, "org_vocab_size") and hasattr(module, "weight")]
    unique = {id(module.weight): module for module in padded}
    return sum((len(module.weight) - module.org_vocab_size) * module.weight.shape[1] for module in unique.values())
