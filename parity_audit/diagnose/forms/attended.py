"""The values that attention averaged, found from what it made of them.

For one row of tokens and one head, z = P V with the pattern P `[query key]`. P is square, and triangular where attention
is causal, so V = P^-1 z: the values that were really attended, laid beside those of the `v` site. Rounding of z grows by the rows
of P^-1; tokens of which it would grow too far are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from einops import einsum, rearrange
from torch import Tensor

from parity_audit.capture.store import Capture
from parity_audit.compare.floor import dtype_eps
from parity_audit.core.limits import TINY
from parity_audit.core.sites import layer_of
from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import f64, real
from parity_audit.diagnose.forms.kinds import MOST_LEFT, NARROW, OWN_TOKENS, STEPS, late
from parity_audit.diagnose.forms.pair import Form, Pair
from parity_audit.diagnose.thresholds import ALIKE, FEWEST_TOKENS, NEAR
from parity_audit.formulas.rotary import ADJACENT, HALF, joined_pairs, parts_of_pairs

ROUNDING = 3 * dtype_eps("float32")
"""What float32 leaves of an average over keys, relative: two or three roundings."""
BESIDE = ("q", "k", "rot_q", "rot_k")


def attended(site: str, own: Capture, true: Capture, d_head: int) -> Pair | None:
    """Attended values and the `v` site's `[token, (head d_head)]`; None where z, v or the pattern are not to be had.

    `site` is a block's z. The pattern is the candidate's own where it shows one, else the one that its queries and keys make.
    """
    block = site.removesuffix("z")
    rows = [row for probe in true.probes for row in _rows(probe, block, own, true)]
    if sum(len(row["attended"]) for row in rows) < FEWEST_TOKENS:
        return None
    parts = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return Pair(own=parts.pop("attended"), true=parts.pop("v"), d_head=d_head, others=parts)


def averaged(site: str, own: Capture, true: Capture) -> Form | None:
    """What the values that attention averaged are, where the pattern times values of another token, or in a narrow dtype, is z.

    The inverse of a pattern magnifies float32's own rounding, in which a narrow dtype's is lost, and all of it where trained weights
    attend to a few tokens; the product does not.
    """
    block = site.removesuffix("z")
    rows = [row for probe in true.probes for row in _tokens(probe, block, own, true)]
    if sum(len(pattern[0]) for pattern, _ in rows) < FEWEST_TOKENS:
        return None

    def apart(left_by: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        left = (left_by(pattern, row["z"], _for_heads(row["v"], len(pattern))) for pattern, row in rows)
        return max(math.sqrt(sum(float(x.square().sum()) for x in left)), TINY)

    largest = max(float(row["v"].abs().max()) for _, row in rows)
    fits = {name: dtype for name, dtype in NARROW.items() if largest <= torch.finfo(dtype).max}
    whole = apart(_left)
    tries = [
        ("rounded", name, "full", apart(partial(_left_rounded, dtype=dtype)) / whole) for name, dtype in fits.items()
    ]
    for step in STEPS:
        moved, own_tokens = (apart(partial(_left_moved, step=by, ends=step)) for by in (step, 0))
        tries.append(("position", late(step), OWN_TOKENS, moved / own_tokens))
    kind, value, usual, left = min(tries, key=lambda tried: tried[-1])
    return Form(kind=kind, value=value, usual=usual, left=left) if left < MOST_LEFT else None


def _left(pattern: Tensor, z: Tensor, v: Tensor) -> Tensor:
    """z `[query head d_head]` less the average of values `[key head d_head]` by a pattern `[head query key]`."""
    averages: Tensor = einsum(pattern, v, "head query key, key head d -> query head d")
    return z - averages


def _left_rounded(pattern: Tensor, z: Tensor, v: Tensor, *, dtype: torch.dtype) -> Tensor:
    return _left(pattern, z, v.to(dtype).to(v))


def _left_moved(pattern: Tensor, z: Tensor, v: Tensor, *, step: int, ends: int) -> Tensor:
    """As `_left`, `[head query d_head]`, of the values of `step` tokens before. Those at one end of the row, of which a shift by
    `ends` leaves no token, may be any: what they can explain is left out."""
    free = torch.arange(len(v))[:ends] if ends > 0 else torch.arange(len(v))[ends:]
    moved = v.roll(step, 0)
    moved[free] = 0.0
    left = rearrange(_left(pattern, z, moved), "query head d -> head query d")
    weights = pattern[..., free]
    explained: Tensor = weights @ (torch.linalg.pinv(weights) @ left)
    return left - explained


def _rows(probe: Probe, block: str, own: Capture, true: Capture) -> Iterator[dict[str, Tensor]]:
    """Real tokens of each row of a probe of which the attended values are known well."""
    for pattern, row in _tokens(probe, block, own, true):
        values, sure = solved(pattern, row.pop("z"), row["v"])
        per_head = {name: _for_heads(x, values.shape[1]) for name, x in {**row, **_moved(row["v"])}.items()}
        yield {
            name: rearrange(x[sure], "token head d_head -> token (head d_head)")
            for name, x in {"attended": values, **per_head, **_turned(per_head)}.items()
        }


def _tokens(probe: Probe, block: str, own: Capture, true: Capture) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The pattern `[head query key]` and the attention's tensors `[token head d_head]` of the real tokens of each row."""
    sources = own.sites(probe.name), true.sites(probe.name)
    pattern = next((side for side, sites in zip((own, true), sources, strict=True) if block + "pattern" in sites), None)
    if pattern is None or not {block + "z", block + "v"} <= sources[0]:
        return
    near = {f"v of block {number}": f"blocks.{number}.v" for number in neighbours(block)}
    wanted = {**{name: block + name for name in ("z", "v", *BESIDE)}, **near}
    tensors = {name: f64(own.tensor(probe.name, site)) for name, site in wanted.items() if site in sources[0]}
    patterns = f64(pattern.tensor(probe.name, block + "pattern"))
    for batch, mask in enumerate(real(probe)):
        kept = mask.nonzero()[:, 0]
        yield patterns[batch][:, kept][:, :, kept], {name: x[batch, kept] for name, x in tensors.items()}


def solved(pattern: Tensor, z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """V = P^-1 z of pattern `[head q k]` and z `[q head d_head]`, and the tokens where rounding leaves it sure `[k]`."""
    inverse = torch.linalg.pinv(pattern)
    values = torch.einsum("hkq,qhd->khd", inverse, z)
    rms = z.square().mean((0, 2)).sqrt()
    error = ROUNDING * inverse.norm(dim=-1) * rms[:, None]
    size = v.square().mean().sqrt()
    return values, (error <= NEAR * size).all(0)


def neighbours(site: str) -> tuple[int, ...]:
    """The blocks before and after that of a site; none where it is in no block."""
    layer = layer_of(site)
    return () if layer is None else (layer - 1, layer + 1)


def _moved(v: Tensor) -> dict[str, Tensor]:
    """Values of the token before and of the one after."""
    return {"v of the token before": v.roll(1, 0), "v of the token after": v.roll(-1, 0)}


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys and values `[token kv_head d_head]` repeated for the heads that read them."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _turned(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values turned as the keys are: each pair of a key as a complex number, after over before, times that of the value."""
    if not {"k", "rot_k"} <= row.keys() or len({row[site].shape[-1] for site in ("k", "rot_k", "v")}) > 1:
        return {}
    found = {}
    for layout in (HALF, ADJACENT):
        before, after, v = (torch.complex(*parts_of_pairs(row[site], layout)) for site in ("k", "rot_k", "v"))
        turn = after / before
        if float((turn.abs() - turn.abs().mean()).abs().max()) < ALIKE:
            made = v * turn
            found[f"v turned as keys are ({layout})"] = joined_pairs(made.real, made.imag, layout)
    return found
