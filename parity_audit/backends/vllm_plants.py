"""Sharding faults as edits of a running vLLM engine; tests plant them and check that the audit names the cause.

Each edit changes a layer as a port would that shards it wrongly. Edits that need the weights of other ranks gather
them, so all ranks have to make the edit. `value={"rank": 1}` then limits the change to that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity_audit.backends.paths import matches
from parity_audit.backends.vllm_cuts import of_weight
from parity_audit.backends.vllm_weights import live_weight
from parity_audit.core.types import Edit

Change = list[tuple[str, Any]]
"""Pairs of a path and its new value."""


@dataclass(frozen=True)
class After:
    """Calls a module's `forward`, or another function, and applies `change` to its output or the first of its outputs."""

    function: Callable[..., Any]
    change: Callable[[Tensor], Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.function(*args, **kwargs)
        return (self.change(out[0]), *out[1:]) if isinstance(out, tuple) else self.change(out)


@dataclass(frozen=True)
class Plain:
    """Computes a linear layer's product with `weight` in place of the weight that the engine has packed."""

    weight: Tensor

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)


def _group() -> Any:
    from vllm.distributed import parallel_state

    return parallel_state.get_tp_group()


def gathered(own: Tensor) -> list[Tensor]:
    """Return this tensor of every rank, in order of rank."""
    group = _group()
    parts: Tensor = group.all_gather(own.contiguous(), dim=0)
    return list(parts.chunk(group.world_size))


def _after(root: Any, edit: Edit, change: Callable[[Tensor], Tensor], name: str = "forward") -> Change:
    return [(f"{path}.{name}", After(getattr(owner, name), change)) for path, owner in matches(root, edit.path)]


def _reduced_again(root: Any, edit: Edit) -> Change:
    """Sum an output over the ranks a second time, although every rank already has the sum."""
    return _after(root, edit, lambda out: _group().all_reduce(out))


def _tokens_exchanged(root: Any, edit: Edit) -> Change:
    """Gather the ranks' tokens in reverse order, as faulty sequence parallelism would."""
    return _after(root, edit, lambda out: torch.cat(out.chunk(_group().world_size)[::-1]))


def _vocabulary_reversed(root: Any, edit: Edit) -> Change:
    """Gather the logits with the ranks in reverse order."""
    return _after(root, edit, lambda out: torch.cat(out.chunk(_group().world_size, -1)[::-1], -1), "_gather_logits")


def _local_norm(root: Any, edit: Edit) -> Change:
    """Compute an RMS norm in which each rank takes the mean square over its own channels alone."""

    def change(owner: Any) -> Callable[[Tensor], Tensor]:
        original = owner.forward

        def forward(x: Tensor, residual: Tensor | None = None) -> Any:
            total = x if residual is None else x + residual
            right = original(x.clone(), None if residual is None else residual.clone())
            out = right if residual is None else right[0]
            parts = total.chunk(_group().world_size, -1)
            mean = total.square().mean(-1, keepdim=True)
            own = torch.cat(
                [(mean / part.square().mean(-1, keepdim=True)).sqrt().expand_as(part) for part in parts], -1
            )
            return out * own if residual is None else (out * own, right[1])

        return forward

    return [(f"{path}.forward", change(owner)) for path, owner in matches(root, edit.path)]


def _vocabulary_offset(root: Any, edit: Edit) -> Change:
    """Shift the token ids of an embedding's part: it starts `value` ids later than the rows that the rank holds."""
    return [
        (f"{path}.shard_indices", replace(
            owner.shard_indices, org_vocab_start_index=owner.shard_indices.org_vocab_start_index + edit.value,
            padded_org_vocab_start_index=owner.shard_indices.padded_org_vocab_start_index + edit.value,
        ))
        for path, owner in matches(root, edit.path)
    ]  # fmt: skip


def _weight(root: Any, edit: Edit, made: Callable[[nn.Module, str, list[Tensor]], Tensor]) -> Change:
    """Replace the weight of a linear layer by what `made` returns for the weights of all ranks."""
    changes: Change = []
    for path, _ in list(matches(root, edit.path)):
        held = gathered(live_weight(root, f"{path}.weight"))
        value = made(root, f"{path}.weight", held)
        only = (edit.value or {}).get("rank")
        if only is None or only == _group().rank_in_group:
            changes.append((f"{path}.cpu_linear", Plain(value)))
            changes.append((f"{path}.weight", nn.Parameter(value, requires_grad=False)))
    return changes


def _fused_order(root: Any, edit: Edit) -> Change:
    """Give each rank one contiguous block of the whole fused tensor, instead of a piece of each of its parts."""

    def made(model: nn.Module, path: str, held: list[Tensor]) -> Tensor:
        sizes = list(of_weight(model, path, held[0]).sizes)
        split = [part.split(sizes) for part in held]
        whole = torch.cat([torch.cat([of[number] for of in split]) for number in range(len(sizes))])
        own: Tensor = whole.chunk(len(held))[_group().rank_in_group]
        return own.clone()

    return _weight(root, edit, made)


def _part_of_next_rank(root: Any, edit: Edit) -> Change:
    """Replace the pieces numbered `value["parts"]` of a fused tensor (all by default) by those of the next rank."""

    def made(model: nn.Module, path: str, held: list[Tensor]) -> Tensor:
        cut, own = of_weight(model, path, held[0]), _group().rank_in_group
        mine, other = (held[rank].split(list(cut.sizes), cut.axis) for rank in (own, (own + 1) % len(held)))
        taken: Sequence[int] = (edit.value or {}).get("parts", range(len(cut.sizes)))
        return torch.cat([other[n] if n in taken else mine[n] for n in range(len(cut.sizes))], cut.axis)

    return _weight(root, edit, made)


def _old_weight(root: Any, edit: Edit) -> Change:
    """Multiply a weight by `value["times"]` (0.99 by default), as if the rank had missed the last update."""
    return _weight(
        root, edit, lambda model, path, held: held[_group().rank_in_group] * (edit.value or {}).get("times", 0.99)
    )


def _experts_exchanged(root: Any, edit: Edit) -> Change:
    """Exchange the weights of the first two experts of a layer."""
    changes: Change = []
    for path, owner in matches(root, edit.path):
        for name in ("w13_weight", "w2_weight"):
            held = getattr(owner, name).data.clone()
            held[[0, 1]] = held[[1, 0]]
            changes.append((f"{path}.{name}", nn.Parameter(held, requires_grad=False)))
    return changes


PLANTS = {
    "reduced_again": _reduced_again,
    "tokens_exchanged": _tokens_exchanged,
    "vocabulary_reversed": _vocabulary_reversed,
    "local_norm": _local_norm,
    "vocabulary_offset": _vocabulary_offset,
    "fused_order": _fused_order,
    "part_of_next_rank": _part_of_next_rank,
    "old_weight": _old_weight,
    "experts_exchanged": _experts_exchanged,
}
