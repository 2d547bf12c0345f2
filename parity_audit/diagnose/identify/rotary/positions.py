"""At which positions do the tokens of a row stand?

Usually token i stands at i + offset, and slow pairs give the offset roughly, faster ones exactly. Where the pairs do
not turn evenly, each token's position is looked for on its own: the whole number p whose angles f p agree best with
all its pairs. Frequencies then come from the median increment, which a jump here and there does not disturb.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parity_audit.core.types import KnobValue
from parity_audit.diagnose.identify.rotary.turns import Turn

NEAR = 32
AGREES = 0.97


def even_offset(position: Tensor, factor: Tensor, inv_freq: Tensor) -> float:
    """What the first token's position is, in whole positions."""
    near = position < NEAR  # further out, errors of the increments would add up
    angle = position[near, None] * inv_freq
    start = (factor[near] * torch.polar(torch.ones_like(angle), -angle)).sum(0).angle()
    order = inv_freq.abs().argsort()
    guess = 0.0
    for pair in order[inv_freq.abs()[order] > 1e-3].tolist():
        f = float(inv_freq[pair])
        left = (float(start[pair]) - f * guess + math.pi) % (2 * math.pi) - math.pi
        guess += left / f
    return float(round(guess)) if abs(guess - round(guess)) < 0.1 else guess


def median_increments(positions: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    """Frequencies `[pair]` as the median step between neighbouring tokens."""
    steps = []
    for position, factor in zip(positions, factors, strict=True):
        step = factor[1:] * factor[:-1].conj()
        steps.append(step[(position[1:] - position[:-1]) == 1])
    joined = torch.cat(steps)
    unit = joined / joined.abs().clamp_min(1e-300)
    middle = unit.sum(0).angle()
    off = (unit * torch.polar(torch.ones_like(middle), -middle)).angle()
    return middle + off.median(0).values


def each_position(factor: Tensor, inv_freq: Tensor, length: int) -> Tensor | None:
    """Each token's own whole position `[pos]`; None where no position agrees with a token's angles."""
    candidates = torch.arange(-length, 2 * length + NEAR, dtype=torch.float64)
    unit = factor / factor.abs().clamp_min(1e-300)
    angle = candidates[:, None] * inv_freq
    agreement = (unit @ torch.polar(torch.ones_like(angle), -angle).T).real / inv_freq.numel()
    best, at = agreement.max(-1)
    return candidates[at] if float(best.min()) > AGREES else None


def described(turns: Sequence[Turn], positions: Sequence[Tensor]) -> tuple[KnobValue, dict[str, object]]:
    """Where positions start: a number for all rows, or what is wrong in words; and the facts."""
    shifts = [position - turn.position for turn, position in zip(turns, positions, strict=True)]
    starts = [float(shift[0]) for shift in shifts]
    facts: dict[str, object] = {"first_positions": starts, "note": "scores depend on distances only"}
    uneven = next((k for k, shift in enumerate(shifts) if float((shift - shift[0]).abs().max()) > 0.5), None)
    if uneven is not None:
        wrong = int((shifts[uneven] - shifts[uneven][0]).abs().gt(0.5).nonzero()[0])
        facts |= {"probe": turns[uneven].probe, "token": wrong, "position": float(positions[uneven][wrong])}
        return where_they_stand(turns[uneven].position, positions[uneven]), facts
    if len(set(starts)) == 1:
        return starts[0], facts
    padded = all(start == float(turn.index[0]) for start, turn in zip(starts, turns, strict=True))
    return ("counted from the padding" if padded else "differs between rows"), facts


def where_they_stand(place: Tensor, own: Tensor) -> str:
    """Positions of a row `[pos]`, which should be `place`, in words: they stop, start again, or go on otherwise."""
    shift = own - place
    top = float(own.max())
    if bool((own == place.clamp_max(top)).all()):
        return f"stop at {top:.0f}"
    if bool((own == place % (top + 1)).all()):
        return f"start again after {top:.0f}"
    first = int((shift != shift[0]).nonzero()[0])
    if bool((shift[:first] == 0).all()):
        if bool((shift[first:] == shift[first]).all()):
            return f"{shift[first]:+.0f} from token {place[first]:.0f} on"
        if bool((own[first:] == own[first]).all()):
            return f"all at {own[first]:.0f} from token {place[first]:.0f} on"
    return "uneven"
