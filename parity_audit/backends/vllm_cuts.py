"""Describe how a vLLM layer divides its activations and weights among the ranks of tensor parallelism.

The description is read from the attributes of the layer itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parity_audit.backends.paths import get
from parity_audit.backends.shards import WHOLE, Shard

OUT, IN = 0, 1
"""Axes of a linear layer's weight."""


def of_activation(module: nn.Module, *, given: bool) -> Shard | None:
    """Return how the output of a linear layer, or its input if `given` is true, is divided among ranks.

    Returns None for a module that is no parallel linear layer.
    """
    if hasattr(module, "input_is_parallel"):
        return _row_input(module) if given else Shard(summand=not module.reduce_results)
    if hasattr(module, "gather_output"):
        return WHOLE if given or module.gather_output else _column(module)
    return None


def _row_input(module: Any) -> Shard:
    return Shard(sizes=(module.input_size_per_partition,)) if module.input_is_parallel else WHOLE


def _column(module: Any) -> Shard:
    """Return the cut of a layer whose output columns are divided, one piece for each fused part.

    In a fused query-key-value layer each rank has its own queries, but neighbouring ranks may hold copies of keys and
    values.
    """
    sizes = tuple(module.output_partition_sizes)
    copies = getattr(module, "num_kv_head_replicas", 1)
    return Shard(sizes=sizes, copies=(1, *(copies,) * (len(sizes) - 1)))


def of_weight(model: nn.Module, path: str, value: Tensor) -> Shard:
    """Return how the parameter at `path` is divided among ranks; `value` is what this rank holds of it."""
    owner_path, _, leaf = path.rpartition(".")
    owner: Any = get(model, owner_path) if owner_path else model
    kind = leaf.partition("[")[0]
    if hasattr(owner, "shard_indices"):
        start, stop = _ids(owner)
        return Shard(axis=OUT, sizes=(len(value),), real=stop - start)
    if getattr(owner, "tp_size", 1) == 1 and not hasattr(owner, "w13_weight"):
        return WHOLE
    if hasattr(owner, "input_is_parallel"):
        return Shard(axis=IN, sizes=(value.shape[IN],)) if value.ndim > 1 else WHOLE
    if hasattr(owner, "gather_output"):
        column = _column(owner)
        return Shard(axis=OUT, sizes=column.sizes, copies=column.copies)
    if hasattr(owner, "w13_weight"):
        return _experts(owner, kind, value)
    return WHOLE


def vocabulary(model: nn.Module) -> tuple[int, int] | None:
    """Return the token ids `[start, stop)` whose embeddings this rank has to hold, None if it has no embedding."""
    owners = (module for module in model.modules() if hasattr(module, "shard_indices"))
    return next(map(_ids, owners), None)


def _ids(owner: Any) -> tuple[int, int]:
    """Return the token ids `[start, stop)` of an embedding layer's part, computed from the layer's sizes.

    The layer's own `shard_indices` are not used, because a faulty port may have them wrong.
    """
    each = owner.org_vocab_size_padded // owner.tp_size
    start = min(owner.tp_rank * each, owner.org_vocab_size)
    return start, min(start + each, owner.org_vocab_size)


def local_path(model: nn.Module, path: str) -> str:
    """Return the path on this rank of a parameter with the given path in an unsharded engine.

    The two differ only for experts that are numbered anew on each rank. The result is empty if another rank holds the
    expert.
    """
    owner_path, _, leaf = path.rpartition(".")
    placed = getattr(get(model, owner_path) if owner_path else model, "expert_map", None)
    kind, _, number = leaf.partition("[")
    if placed is None or not number:
        return path
    own = int(placed[int(number.rstrip("]"))])
    return "" if own < 0 else f"{owner_path}.{kind}[{own}]"


def _experts(owner: Any, kind: str, value: Tensor) -> Shard:
    """Return how a fused parameter of all experts is divided among ranks.

    With expert parallelism each rank holds some experts entirely. Otherwise each rank holds some neurons of every
    expert: rows of the gate and up projections (`w13`, fused), and columns of the down projection (`w2`).
    """
    if getattr(owner, "expert_map", None) is not None:
        return Shard(axis=0, sizes=(len(value),)) if value.ndim == owner.w13_weight.ndim else WHOLE
    if kind.startswith("w13"):
        axis = value.ndim - 2 if kind.endswith("weight") else value.ndim - 1
        half = value.shape[axis] // 2
        return Shard(axis=axis, sizes=(half, half), copies=(1, 1))
    return Shard(axis=value.ndim - 1, sizes=(value.shape[-1],)) if kind == "w2_weight" else WHOLE
