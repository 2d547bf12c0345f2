"""Recover the values that attention averaged, from the attention pattern and the output z.

For one row of tokens and one head, z = P V with the pattern P `[query key]`. P is square, and triangular where
attention is causal, so V = P^-1 z: the values that were really attended, to be compared with those of the `v` site. The
rounding of z grows by the norms of the rows of P^-1; tokens at which it would grow too far are left out.
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
from parity_audit.diagnose.forms.kinds import MOST_LEFT, NARROW, OWN_TOKENS, STEPS, shift_in_words
from parity_audit.diagnose.forms.pair import ActualExpected, Description
from parity_audit.diagnose.thresholds import ALIKE, FEWEST_TOKENS, NEAR
from parity_audit.formulas.rotary import ADJACENT, HALF, joined_pairs, parts_of_pairs

ROUNDING = 3 * dtype_eps("float32")
"""The relative error that float32 leaves in an average over keys: two or three roundings."""
BESIDE = ("q", "k", "rot_q", "rot_k")


def attended(site: str, own: Capture, true: Capture, d_head: int) -> ActualExpected | None:
    """Return the attended values and those of the `v` site, `[token, (head d_head)]`; None if too few tokens can be
    recovered.

    `site` is the z of a block. The pattern is the candidate's own if it is captured, else the one that the judge
    computed from the candidate's queries and keys. z and v must be captured.
    """
    block = site.removesuffix("z")
    rows = [row for probe in true.probes for row in _rows(probe, block, own, true)]
    if sum(len(row["attended"]) for row in rows) < FEWEST_TOKENS:
        return None
    parts = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return ActualExpected(own=parts.pop("attended"), true=parts.pop("v"), d_head=d_head, others=parts)


def averaged(site: str, own: Capture, true: Capture) -> Description | None:
    """Return a description of the averaged values if the pattern times values rounded to a narrow dtype, or of another
    token, gives z.

    The inverse of the pattern amplifies rounding in float32, so that the rounding of a narrow dtype is lost in it, and
    everything is where trained weights attend to a few tokens. The product with the pattern does not amplify it.
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
        tries.append(("position", shift_in_words(step), OWN_TOKENS, moved / own_tokens))
    kind, value, usual, left = min(tries, key=lambda tried: tried[-1])
    return Description(kind=kind, value=value, usual=usual, share_left=left) if left < MOST_LEFT else None


def _left(pattern: Tensor, z: Tensor, v: Tensor) -> Tensor:
    """Return z `[query head d_head]` minus the average of values `[key head d_head]` weighted by a pattern `[head
    query key]`."""
    averages: Tensor = einsum(pattern, v, "head query key, key head d -> query head d")
    return z - averages


def _left_rounded(pattern: Tensor, z: Tensor, v: Tensor, *, dtype: torch.dtype) -> Tensor:
    return _left(pattern, z, v.to(dtype).to(v))


def _left_moved(pattern: Tensor, z: Tensor, v: Tensor, *, step: int, ends: int) -> Tensor:
    """Return the difference of `_left`, `[head query d_head]`, for the values of `step` tokens before.

    The tokens at one end of the row, for which a shift by `ends` leaves no value, may have any values: what such values
    can explain is subtracted.
    """
    free = torch.arange(len(v))[:ends] if ends > 0 else torch.arange(len(v))[ends:]
    moved = v.roll(step, 0)
    moved[free] = 0.0
    left = rearrange(_left(pattern, z, moved), "query head d -> head query d")
    weights = pattern[..., free]
    explained: Tensor = weights @ (torch.linalg.pinv(weights) @ left)
    return left - explained


def _rows(probe: Probe, block: str, own: Capture, true: Capture) -> Iterator[dict[str, Tensor]]:
    """Yield, for each row of a probe, the tensors of the real tokens whose attended values can be recovered
    accurately."""
    for pattern, row in _tokens(probe, block, own, true):
        values, sure = solved(pattern, row.pop("z"), row["v"])
        per_head = {name: _for_heads(x, values.shape[1]) for name, x in {**row, **_moved(row["v"])}.items()}
        yield {
            name: rearrange(x[sure], "token head d_head -> token (head d_head)")
            for name, x in {"attended": values, **per_head, **_turned(per_head)}.items()
        }


def _tokens(probe: Probe, block: str, own: Capture, true: Capture) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the pattern `[head query key]` and the attention's tensors `[token head d_head]` of the real tokens of
    each row."""
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
    """Return V = P^-1 z, `[key head d_head]`, and a mask `[key]` of the tokens at which rounding leaves it accurate.

    Args:
        pattern: the attention pattern P, `[head query key]`.
        z: the output of attention, `[query head d_head]`.
        v: the values at the `v` site, whose size the error is compared with.
    """
    inverse = torch.linalg.pinv(pattern)
    values = torch.einsum("hkq,qhd->khd", inverse, z)
    rms = z.square().mean((0, 2)).sqrt()
    error = ROUNDING * inverse.norm(dim=-1) * rms[:, None]
    size = v.square().mean().sqrt()
    return values, (error <= NEAR * size).all(0)


def neighbours(site: str) -> tuple[int, ...]:
    """Return the block before that of a site and the block after it; empty if the site is outside the blocks."""
    layer = layer_of(site)
    return () if layer is None else (layer - 1, layer + 1)


def _moved(v: Tensor) -> dict[str, Tensor]:
    """Return the values of the token before and those of the token after, by name."""
    return {"v of the token before": v.roll(1, 0), "v of the token after": v.roll(-1, 0)}


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values `[token kv_head d_head]` for the query heads that read them."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _turned(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values rotated as the keys are, by name.

    Each pair of components is taken as a complex number: a rotated key over the unrotated one, times the value. Layouts
    in which the keys are not purely rotated are left out.
    """
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
