"""What every module (or hook point) of a model computes for a text, cut into pieces, alone or in a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Sites = dict[str, Tensor]
Call = Callable[[Tensor, Any], Tensor]
"""Logits of more tokens `[batch, new]` after a cache."""


@contextmanager
def recorded(model: nn.Module, into: dict[str, list[Tensor]]) -> Iterator[None]:
    """Append the tensors that each module returns."""

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            for index, part in enumerate(parts):
                if isinstance(part, Tensor) and part.is_floating_point() and part.dim() > 1:
                    into.setdefault(f"{name}:{index}", []).append(part.detach().clone())

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(model: nn.Module, call: Call, tokens: Tensor, cuts: Sequence[int]) -> Sites:
    """Every site of a text `[batch, pos]`, given in pieces that end at `cuts` and then at its end."""
    from transformers import DynamicCache

    seen: dict[str, list[list[Tensor]]] = {}
    cache = DynamicCache() if cuts else None
    stops = (*cuts, tokens.shape[1])
    for start, stop in zip((0, *cuts), stops, strict=True):
        piece: dict[str, list[Tensor]] = {}
        with torch.no_grad(), recorded(model, piece):
            piece["returned"] = [call(tokens[:, start:stop], cache)]
        for name, tensors in piece.items():
            seen.setdefault(name, []).append(tensors)
    return {
        f"{name}#{index}": joined([step[index] for step in steps], (0, *cuts), stops)
        for name, steps in seen.items()
        for index in range(len(steps[0]))
    }


def joined(pieces: list[Tensor], starts: Sequence[int], stops: Sequence[int]) -> Tensor:
    """Pieces along the positions of the queries; keys that a query may not see, or that are not there yet, are zero."""
    parts = []
    for piece, start, stop in zip(pieces, starts, stops, strict=True):
        if piece.dim() == 4 and piece.shape[2:] == (
            stop - start,
            stop,
        ):  # scores and patterns [batch, head, query, key]
            seen = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)
            parts.append(nn.functional.pad(piece.masked_fill(~seen, 0), (0, stops[-1] - stop)))
        else:
            parts.append(piece)
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    axis = next((axis for axis in (1, 2) if [part.shape[axis] for part in parts] == sizes), None)
    if axis is None:
        raise ValueError(f"no axis of positions in {[list(part.shape) for part in parts]}")
    return torch.cat(parts, dim=axis)


def different(sites: Sites, whole: Sites) -> list[str]:
    """Sites that are not equal bit for bit; every site has to be there."""
    assert sites.keys() == whole.keys()
    return [name for name in whole if not torch.equal(sites[name], whole[name])]


def rows(sites: Sites, index: int, batch: int) -> Sites:
    """One text of a batch."""
    return {name: site[index : index + 1] if site.shape[0] == batch else site for name, site in sites.items()}
