"""Rotary positions: each pair of components of a query or key turns by an angle that grows with the position.

    (a, b) -> m (a cos t - b sin t, b cos t + a sin t),   t = position * frequency of the pair

Pairs are components j and j + d_rot/2 ("half": Llama, GPT-NeoX) or 2j and 2j + 1 ("adjacent": GPT-J, Cohere). Components
from d_rot on stay. m is the attention factor of YaRN and LongRoPE. Source: RoFormer (arXiv 2104.09864).
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
"""Which components turn together, and where the turned ones are written: scores are the same wherever that is."""
ANGLES_OF = dict(zip(OTHER_ANGLES, (ADJACENT, HALF), strict=True))
"""For which convention the table is laid out where it is not the one that joins components."""
FREQUENCIES_32, TABLE_32, FULL = "float32 frequencies", "float32 table", "full"
"""What is rounded to float32: the frequencies, or also the cosines and sines of a table (GPT-J); or nothing."""
SIGNS = {
    FORWARD: (-1.0, 1.0), INVERSE: (1.0, -1.0), NO_MINUS: (1.0, 1.0), BOTH_MINUS: (-1.0, -1.0),
    NO_SINES: (0.0, 0.0), NO_SINE_OF_FIRST: (0.0, 1.0), NO_SINE_OF_SECOND: (-1.0, 0.0),
}  # fmt: skip
"""The signs of the sines that b and a are multiplied by; a rotation has one minus."""


def angles(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, *, rounding: str = FULL, arithmetic: str = FULL
) -> tuple[Tensor, Tensor]:
    """cos and sin `[batch pos pair]` in `dtype`, of positions `[batch pos]` and frequencies `[pair]`.

    `arithmetic`: `full`, or a narrow dtype and one of `choices.PLACES_IN_A_ROTATION`.
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
    """x `[batch pos head d_head]` with 2 * pair components of each head turned.

    Args:
        cos, sin: `[batch pos pair]`.
        pairing: a key of `READ_WRITTEN`.
        factor: on cos and sin.
        first: the first component that turns.
        direction: one of `choices.DIRECTIONS`.

    Raises:
        ValueError: a head has no such components.
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
    """The first and the second component of each pair, each `[... pair]`, of x `[... 2*pair]` in the layout `HALF` or `ADJACENT`.

    They are views: rotations are computed for thousands of values, and most of their time would be copies.
    """
    first, second = x.chunk(2, -1) if layout == HALF else (x[..., 0::2], x[..., 1::2])
    return first, second


def joined_pairs(first: Tensor, second: Tensor, layout: str) -> Tensor:
    """x `[... 2*pair]` of the two components of each pair, `[... pair]`: the inverse of `parts_of_pairs`."""
    return torch.cat([first, second], -1) if layout == HALF else torch.stack([first, second], -1).flatten(-2)


def _of_both_parts(table: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """What a table `[... pair]` has for the first and for the second component of each pair."""
    if pairing not in ANGLES_OF:
        return table, table
    return parts_of_pairs(joined_pairs(table, table, ANGLES_OF[pairing]), READ_WRITTEN[pairing][0])
