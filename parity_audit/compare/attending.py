"""Decide whether a block attends to other keys than the judge does, in cases where the block's result does not show it.

In a narrow dtype the result of attention is a coarse measure: if nearly all weight falls on one key (an attention
sink), or if distances are long, a wrong scale or rotation may leave the result within rounding. The tensors inside
attention still show the error, even if a program computes them in its own way:

- patterns are compared by their logarithms, which rounding changes by as much as the scores, however large these are;
- rotated queries and keys are compared by their products, after removing the mean over the keys of each query and a
  common factor, because a softmax ignores the first and the scale may compensate the second.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from parity_audit.compare.floor import noise_ratio
from parity_audit.compare.source import TensorSource
from parity_audit.compare.threads import one_thread
from parity_audit.core.limits import INNER_RATIO, TINY
from parity_audit.core.types import Probe

SEEN_WEIGHT = 1e-4
"""Weights below this count as equal: what a key of so little weight adds to a result is lost in bfloat16 rounding."""
QUERIES = 16
"""Number of queries of each row whose products with every key are compared: the last ones, which are furthest from the
first keys."""


@one_thread()
def attends_otherwise(candidate: TensorSource, judge: TensorSource, layer: int | None, dtype: str) -> bool:
    """Whether a block's pattern, or its rotated queries and keys, depart from the judge's by more than rounding.

    Args:
        candidate: the tensors that the candidate shows.
        judge: the same sites in float64, computed from the block's own queries, keys and values before rotation.
        layer: the block.
        dtype: the dtype in which the candidate computes.
    """
    for probe in candidate.probes:
        shared = candidate.sites(probe.name) & judge.sites(probe.name)
        if _sites(layer, "rot_q", "rot_k") <= shared and _rotated_apart(candidate, judge, probe, layer, dtype):
            return True
        if _sites(layer, "attn_scores", "pattern") <= shared and _weighed_apart(candidate, judge, probe, layer, dtype):
            return True
    return False


def _sites(layer: int | None, *names: str) -> set[str]:
    return {f"blocks.{layer}.{name}" for name in names}


def _weighed_apart(candidate: TensorSource, judge: TensorSource, probe: Probe, layer: int | None, dtype: str) -> bool:
    own, true, scores = (
        rearrange(_whole(side, probe, f"blocks.{layer}.{name}"), "batch head query key -> batch query head key")[
            _real(probe)
        ]
        for side, name in ((candidate, "pattern"), (judge, "pattern"), (judge, "attn_scores"))
    )
    read = (own > SEEN_WEIGHT) | (true > SEEN_WEIGHT)
    apart = (own.clamp_min(SEEN_WEIGHT).log() - true.clamp_min(SEEN_WEIGHT).log())[read]
    size = 1.0 + _rms(scores[read & scores.isfinite()])
    return noise_ratio(_rms(apart), 0.0, size, dtype) > INNER_RATIO


def _rotated_apart(candidate: TensorSource, judge: TensorSource, probe: Probe, layer: int | None, dtype: str) -> bool:
    sides = [
        [_whole(side, probe, f"blocks.{layer}.{name}") for name in ("rot_q", "rot_k")] for side in (candidate, judge)
    ]
    apart, size = [], []
    for row, real in enumerate(_real(probe)):
        (own, _), (true, terms) = (_products(query[row][real][-QUERIES:], key[row][real]) for query, key in sides)
        factor = float((own * true).sum() / true.square().sum().clamp_min(TINY))
        apart.append((own - factor * true).flatten())
        size.append(factor * terms.flatten())
    return noise_ratio(_rms(torch.cat(apart)), 0.0, _rms(torch.cat(size)), dtype) > INNER_RATIO


def _products(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Products `[head query key]` of queries and keys less their mean over keys, and the size of their terms.

    Queries are `[query head d_head]`, keys `[key kv_head d_head]`. The size of the terms is the root of the sum of
    their squares.
    """
    every = repeat(key, "key head d -> key (head group) d", group=query.shape[1] // key.shape[1])
    products, squares = (
        einsum(x, y, "query head d, key head d -> head query key") for x, y in ((query, every), (query**2, every**2))
    )
    return products - products.mean(-1, keepdim=True), squares.sqrt()


def _whole(side: TensorSource, probe: Probe, site: str) -> Tensor:
    return side.rows(probe.name, site, 0, side.shape(probe.name, site)[1]).double()


def _real(probe: Probe) -> Tensor:
    return torch.tensor(probe.mask, dtype=torch.bool)


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt())
