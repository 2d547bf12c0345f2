"""Rotary positions: each pair of components of a query or key turns by an angle that grows with the position.

    (a, b) -> m (a cos t - b sin t, b cos t + a sin t),   t = position * frequency of the pair

Pairs are components j and j + d_rot/2 ("half": Llama, GPT-NeoX) or 2j and 2j + 1 ("adjacent": GPT-J, Cohere). Components
from d_rot on are not rotated. m is the attention factor of YaRN and LongRoPE. Source: RoFormer (arXiv 2104.09864).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from parity_audit.formulas.choices import (
    BOTH_MINUS,
    EXCHANGED,
    FORWARD,
    INVERSE,
    NO_COSINES,
    NO_MINUS,
    NO_SINE_OF_FIRST,
    NO_SINE_OF_SECOND,
    NO_SINES,
    OTHER_ANGLES,
    PAIRINGS,
)
from parity_audit.formulas.rounding import steps_of

HALF, ADJACENT = "half", "adjacent"
READ_WRITTEN = dict(
    zip(
        PAIRINGS,
        ((HALF, HALF), (ADJACENT, ADJACENT), (HALF, ADJACENT), (ADJACENT, HALF), (HALF, HALF), (ADJACENT, ADJACENT)),
        strict=True,
    )
)
"""For each pairing, the layout in which pairs are read and the layout in which the rotated pairs are written. The layout of writing
does not change the scores as long as it is the same for queries and keys."""
ANGLES_OF = dict(zip(OTHER_ANGLES, (ADJACENT, HALF), strict=True))
"""The layout of the table of angles, for pairings that read pairs in one layout and the table in the other."""
FREQUENCIES_32, TABLE_32, FULL = "float32 frequencies", "float32 table", "full"
"""What is computed in float32: the frequencies; also the angles and their cosines and sines (GPT-J); or nothing."""
SIGNS = {
    FORWARD: (-1.0, 1.0), INVERSE: (1.0, -1.0), NO_MINUS: (1.0, 1.0), BOTH_MINUS: (-1.0, -1.0),
    NO_SINES: (0.0, 0.0), NO_SINE_OF_FIRST: (0.0, 1.0), NO_SINE_OF_SECOND: (-1.0, 0.0),
}  # fmt: skip
"""The factors on the sines that multiply b and a, (-1, 1) for a rotation; 0 leaves the term out."""


def angles(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, *, rounding: str = FULL, arithmetic: str = FULL
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles, each `[batch pos pair]` in `dtype`.

    Args:
        positions: `[batch pos]`.
        frequencies: in radians per position, `[pair]`.
        dtype: the dtype of the result.
        rounding: `TABLE_32` to compute angles, cos and sin in float32; otherwise they are computed in `dtype`.
        arithmetic: `full`, or a narrow dtype followed by one of `choices.PLACES_IN_A_ROTATION`.
    """
    step = steps_of(arithmetic)
    own = torch.float32 if rounding == TABLE_32 else dtype
    places = step("positions", rearrange(positions, "batch pos -> batch pos 1").to(own))
    turned = step("angles", places * step("frequencies", frequencies.to(own)))
    return step("cos", turned.cos()).to(dtype), step("sin", turned.sin()).to(dtype)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, pairing: str = HALF, factor: float = 1.0, first: int = 0,
    direction: str = FORWARD,
) -> Tensor:  # fmt: skip
    """Return x `[batch pos head d_head]` with 2 * pair components of each head rotated.

    Args:
        cos, sin: `[batch pos pair]`.
        pairing: a key of `READ_WRITTEN`.
        factor: m, the factor on cos and sin.
        first: the first component that is rotated.
        direction: one of `choices.DIRECTIONS`.

    Raises:
        ValueError: a head has too few components.
    """
    end = first + 2 * cos.shape[-1]
    if not 0 <= first <= end <= x.shape[-1]:
        raise ValueError(f"a head of {x.shape[-1]} components has none from {first} to {end}")
    read, written = READ_WRITTEN[pairing]
    turning = x[..., first:end]
    a, b = parts_of_pairs(turning, read)
    cos, sin = (sin, cos) if direction == EXCHANGED else (cos, sin)
    cos = torch.zeros_like(cos) if direction == NO_COSINES else cos
    of_b, of_a = SIGNS.get(direction, SIGNS[FORWARD])
    (cos_a, cos_b), (sin_a, sin_b) = (_of_both_parts(table[:, :, None] * factor, pairing) for table in (cos, sin))
    turned = joined_pairs(a * cos_a + b * (of_b * sin_a), b * cos_b + a * (of_a * sin_b), written)
    return turned if turned.shape == x.shape else torch.cat([x[..., :first], turned, x[..., end:]], -1)


def parts_of_pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return the first and second components of all pairs, each `[... pair]`, of x `[... 2*pair]` laid out as `HALF` or `ADJACENT`.

    They are views, because rotations are computed for thousands of values, and copies would take most of the time.
    """
    first, second = x.chunk(2, -1) if layout == HALF else (x[..., 0::2], x[..., 1::2])
    return first, second


def joined_pairs(first: Tensor, second: Tensor, layout: str) -> Tensor:
    """Return x `[... 2*pair]`, joined from the first and second components of the pairs, `[... pair]`.

    This is the inverse of `parts_of_pairs`.
    """
    return torch.cat([first, second], -1) if layout == HALF else torch.stack([first, second], -1).flatten(-2)


def _of_both_parts(table: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """Return the entries of a table `[... pair]` that a program uses for the first and for the second component of each pair.

    They differ only if the pairing reads the table in the layout of the other convention.
    """
    if pairing not in ANGLES_OF:
        return table, table
    return parts_of_pairs(joined_pairs(table, table, ANGLES_OF[pairing]), READ_WRITTEN[pairing][0])
