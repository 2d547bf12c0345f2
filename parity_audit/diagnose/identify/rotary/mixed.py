"""Two pairings in one: components are joined as one convention has it, and turned by the angles of the other.

after_i = c_i before_i + s_i (R before)_i, where R joins a component with its partner: (x_a, x_b) -> (-x_b, x_a). c and s are one
pair of numbers for all heads of a position, by least squares. In a rotation both components of a pair have the same c and s;
where rotate_half comes from one code base and the table from another, they are the same for the other convention's pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.diagnose.identify.rotary.turns import PAIRINGS, Turn

LEFT, SAME = 1e-3, 1e-3
FEWEST_HEADS = 3


def mixed_pairing(turns: Sequence[Turn]) -> str | None:
    """Both conventions in words; None where this is not what happened. A head has to turn whole."""
    short = [turn for turn in turns if not turn.long and turn.before.shape[1] >= FEWEST_HEADS]
    if not short or short[0].before.shape[-1] % 2:
        return None
    for joined in PAIRINGS:
        fits = [_cos_sin(turn, joined) for turn in short]
        if sum(left for _, _, left in fits) > LEFT**2 * sum(float(turn.after.square().sum()) for turn in short):
            continue
        numbers = torch.cat([torch.stack([cos, sin]) for cos, sin, _ in fits], 1)
        angles = [layout for layout in PAIRINGS if _same_in_pairs(numbers, layout)]
        return None if joined in angles or not angles else f"{joined} pairs, turned by the angles of {angles[0]} ones"
    return None


def _paired(layout: str) -> Callable[[Tensor], Tensor]:
    return lambda x: rearrange(x, f"... {PAIRINGS[layout]} -> ... two pair", two=2)


def _cos_sin(turn: Turn, joined: str) -> tuple[Tensor, Tensor, float]:
    """c and s `[pos d_head]` over the heads, and the squares that they leave."""
    a, b = _paired(joined)(turn.before).unbind(-2)
    x, y = turn.before, turn.after
    r = rearrange(torch.stack([-b, a], -2), f"... two pair -> ... {PAIRINGS[joined]}")
    xx, rr, xr, xy, ry = ((u * v).sum(1) for u, v in ((x, x), (r, r), (x, r), (x, y), (r, y)))
    determinant = (xx * rr - xr.square()).clamp_min(1e-300)
    cos, sin = (xy * rr - ry * xr) / determinant, (ry * xx - xy * xr) / determinant
    return cos, sin, float((y - cos[:, None] * x - sin[:, None] * r).square().sum())


def _same_in_pairs(numbers: Tensor, layout: str) -> bool:
    """Whether both components of a pair have the same c and s `[2 pos d_head]`, nearly everywhere."""
    a, b = _paired(layout)(numbers).unbind(-2)
    return float((a - b).abs().flatten().quantile(0.9)) < SAME
