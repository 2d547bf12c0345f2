"""Attention by hand for a given law, and evidence of its sites; formulas from the papers, not from the package."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from loose import loose
from tiny_port import probe
from torch import Tensor

HEADS, KV, D = 4, 2, 32
PROBES = (probe("short", (48,)), probe("ragged", (40, 23, 9), seed=2), probe("left", (30, 12), pad="left", seed=3))
HIDDEN = ("attn_scores", "pattern")


def causal(n: int) -> Tensor:
    """`[query key]`."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def attention(
    dtype: torch.dtype = torch.float32, *, scale: object = 8.0, cap: float | None = None, alibi: Tensor | None = None,
    sinks: Tensor | None = None, mask: Callable[[int], Tensor] = causal, temperature: float = 1.0,
    low: Callable[[Tensor], Tensor] = lambda x: x, low_scores: Callable[[Tensor], Tensor] = lambda x: x,
    absolute: bool = False, hide: tuple[str, ...] = (), heads: int = HEADS, kv: int = KV, seed: int = 0,
    probes: tuple = PROBES, q_times: float = 1.0, weights: dict[str, Tensor] | None = None, k_map: object = None,
    low_inputs: Callable[[Tensor], Tensor] = lambda x: x, low_products: Callable[[Tensor], Tensor] = lambda x: x,
    before_scale: bool = False, gate: Tensor | None = None,
    masked: Callable[[Tensor], Tensor] = lambda s: torch.full_like(s, -math.inf), **knobs: object,
):  # fmt: skip
    """One layer. `mask(n)` is over real tokens; `scale` one number, or one per head; `masked(s)` the scores of hidden keys."""
    sites: dict[tuple[str, str], Tensor] = {}
    for at, item in enumerate(probes):
        g = torch.Generator().manual_seed(100 * seed + at)
        q, k, v = (torch.randn(*item.shape, n, D, generator=g, dtype=torch.float64).to(dtype) for n in (heads, kv, kv))
        q = q * 2
        repeat = list(k_map) if isinstance(k_map, tuple) else [h // (heads // kv) for h in range(heads)]
        grouped = [h // (heads // kv) for h in range(heads)]
        divisor = torch.as_tensor(scale, dtype=dtype).reshape(-1, 1, 1)
        s = low_products(torch.einsum("bihd,bjhd->bhij", low_inputs(q), low_inputs(k)[:, :, repeat]))
        if before_scale and cap is not None:
            s = cap * torch.tanh(s / cap) / divisor
        else:
            s = s / divisor
            s = s if cap is None else cap * torch.tanh(s / cap)
        n = item.shape[1]
        real = torch.tensor(item.mask).bool()
        if alibi is not None:
            place = (real.long().cumsum(1) - 1).to(dtype)
            distance = -place[:, None, :] if absolute else place[:, :, None] - place[:, None, :]
            s = s - alibi.to(dtype)[:, None, None] * distance[:, None]
        see = torch.zeros(item.shape[0], n, n, dtype=torch.bool)
        for row, kept in enumerate(real):
            index = kept.nonzero()[:, 0]
            see[row][index[:, None], index[None]] = mask(len(index))
        blind = ~see.any(-1)
        see[blind] |= torch.eye(n, dtype=torch.bool).expand_as(see)[blind]
        s = low_scores(s)
        s = torch.where(see[:, None], s, masked(s))
        total = s * temperature
        if sinks is not None:
            total = torch.cat([total, sinks.to(dtype)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        p = low(torch.softmax(total, -1)[..., :n])
        z = torch.einsum("bhij,bjhd->bihd", p, v[:, :, grouped])
        z = z if gate is None else z * gate
        own = {"q": q, "k": k, "rot_q": q * q_times, "rot_k": k, "v": v, "z": z, "attn_scores": s, "pattern": p}
        sites |= {(item.name, site): value.float() for site, value in own.items() if site not in hide}
    usual = {"attention__scale": 8.0, "n_kv_heads": kv}
    coarse = str(dtype).removeprefix("torch.") if dtype != torch.float64 else "float32"
    return loose(sites, probes=probes, weights=weights, dtype=coarse, **(usual | knobs))
