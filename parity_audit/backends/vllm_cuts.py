"""How a vLLM layer cuts what it holds over the ranks of tensor parallelism, read off the layer itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parity_audit.backends.paths import get
from parity_audit.backends.shards import WHOLE, Cut

OUT, IN = 0, 1
"""Axes of a linear layer's weight."""


def of_activation(module: nn.Module, *, given: bool) -> Cut | None:
    """How a linear layer's output (or what it is `given`) is cut; None where the layer does not say."""
    if hasattr(module, "input_is_parallel"):
        return _row_input(module) if given else Cut(summand=not module.reduce_results)
    if hasattr(module, "gather_output"):
        return WHOLE if given or module.gather_output else _column(module)
    return None


def _row_input(module: Any) -> Cut:
    return Cut(sizes=(module.input_size_per_partition,)) if module.input_is_parallel else WHOLE


def _column(module: Any) -> Cut:
    """Fused parts side by side: of queries each rank has its own, of keys and values neighbours may have copies."""
    sizes = tuple(module.output_partition_sizes)
    copies = getattr(module, "num_kv_head_replicas", 1)
    return Cut(sizes=sizes, copies=(1, *(copies,) * (len(sizes) - 1)))


def of_weight(model: nn.Module, path: str, value: Tensor) -> Cut:
    """How the parameter at `path` is cut; `value` is what this rank holds of it."""
    owner_path, _, leaf = path.rpartition(".")
    owner: Any = get(model, owner_path) if owner_path else model
    kind = leaf.partition("[")[0]
    if hasattr(owner, "shard_indices"):
        start, stop = _ids(owner)
        return Cut(axis=OUT, sizes=(len(value),), real=stop - start)
    if getattr(owner, "tp_size", 1) == 1 and not hasattr(owner, "w13_weight"):
        return WHOLE
    if hasattr(owner, "input_is_parallel"):
        return Cut(axis=IN, sizes=(value.shape[IN],)) if value.ndim > 1 else WHOLE
    if hasattr(owner, "gather_output"):
        column = _column(owner)
        return Cut(axis=OUT, sizes=column.sizes, copies=column.copies)
    if hasattr(owner, "w13_weight"):
        return _experts(owner, kind, value)
    return WHOLE


def vocabulary(model: nn.Module) -> tuple[int, int] | None:
    """The ids `[start, stop)` whose embeddings this rank has to hold; None where it has no embedding."""
    owners = (module for module in model.modules() if hasattr(module, "shard_indices"))
    return next(map(_ids, owners), None)


def _ids(owner: Any) -> tuple[int, int]:
    """By the sizes of the layer, whatever its indices say."""
    each = owner.org_vocab_size_padded // owner.tp_size
    start = min(owner.tp_rank * each, owner.org_vocab_size)
    return start, min(start + each, owner.org_vocab_size)


def local_path(model: nn.Module, path: str) -> str:
    """The path here of what has this path in an unsharded engine; empty where another rank holds that expert."""
    owner_path, _, leaf = path.rpartition(".")
    placed = getattr(get(model, owner_path) if owner_path else model, "expert_map", None)
    kind, _, number = leaf.partition("[")
    if placed is None or not number:
        return path
    own = int(placed[int(number.rstrip("]"))])
    return "" if own < 0 else f"{owner_path}.{kind}[{own}]"


def _experts(owner: Any, kind: str, value: Tensor) -> Cut:
    """Of every expert each rank holds some neurons: rows of gate and up side by side, columns of down."""
    if getattr(owner, "expert_map", None) is not None:
        return Cut(axis=0, sizes=(len(value),)) if value.ndim == owner.w13_weight.ndim else WHOLE
    if kind.startswith("w13"):
        axis = value.ndim - 2 if kind.endswith("weight") else value.ndim - 1
        half = value.shape[axis] // 2
        return Cut(axis=axis, sizes=(half, half), copies=(1, 1))
    return Cut(axis=value.ndim - 1, sizes=(value.shape[-1],)) if kind == "w2_weight" else WHOLE
