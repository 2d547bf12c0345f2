"""q and k before and after rotation, and which of their components turn together.

A rotation keeps the length of every pair of components. Components that are not rotated are copied bit by bit. So the
rotated ones are those that ever differ, and the partner of the first of them, which turns fastest, reveals the
pairing: the next component is `adjacent`, the one half the rotated width away is `half`. In a narrow dtype slow pairs
round to where they were; `half` shows its width all the same, for `adjacent` what differs is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.core.types import Probe
from parity_audit.diagnose.evidence import Evidence, f64, real
from parity_audit.diagnose.heads import before_rotation
from parity_audit.formulas.rounding import any_narrow

ROTATES = 0.03
STILL = 0.02
LONG_POSITIONS = 128
EVEN = 5e-3
AFTER = {"q": "rot_q", "k": "rot_k"}
PAIRINGS = {"half": "(two pair)", "adjacent": "(pair two)"}
"""How the components of a head lie, by pairing."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Tokens of one sequence before and after rotation: `[pos head d_head]`.

    `position` counts real tokens `[pos]`, `index` the row with its padding, `length` is the whole row's.
    """

    probe: str
    position: Tensor
    index: Tensor
    length: int
    before: Tensor
    after: Tensor

    @property
    def long(self) -> bool:
        """Whether the row is longer than any whose scores are captured."""
        return self.length > 2 * LONG_POSITIONS


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which components turn: the pairing, the first one, how many, and whether the count is exact."""

    pairing: str
    first: int
    d_rot: int
    exact: bool = True


def turns_of(
    evidence: Evidence, probes: Sequence[Probe], which: Sequence[str] = ("q", "k"), *, q_scale: float = 1.0
) -> list[Turn]:
    """Every sequence whose q or k is visible before and after rotation; long ones thinned out, q divided by `q_scale`."""
    turns = []
    for probe in probes:
        found = {name: before_and_after(evidence, probe, name) for name in which}
        pairs = [(before, after / q_scale if name == "q" else after)
                 for name, pair in found.items() if pair is not None for before, after in [pair]]  # fmt: skip
        for batch, mask in enumerate(real(probe)) if pairs else ():
            kept = mask.nonzero()[:, 0]
            chosen = _positions(kept.numel())
            at = kept[chosen]
            before, after = (torch.cat([pair[side][batch, at] for pair in pairs], 1) for side in (0, 1))
            turns.append(Turn(
                probe=probe.name, position=chosen.to(torch.float64), index=at.to(torch.float64), length=kept.numel(),
                before=before, after=after,
            ))  # fmt: skip
    return turns


def before_and_after(evidence: Evidence, probe: Probe, name: str) -> tuple[Tensor, Tensor] | None:
    """q (or k) as it enters and leaves the rotation; after its own norm, where there is one."""
    before, after = before_rotation(evidence, probe.name, name), evidence.tensor(probe.name, AFTER[name])
    return None if before is None or after is None else (f64(before), f64(after))


def _positions(length: int) -> Tensor:
    """All of a short sequence; of a long one the start and a geometric spread to the end."""
    if length <= 2 * LONG_POSITIONS:
        return torch.arange(length)
    far = torch.logspace(math.log10(32), math.log10(length - 1), LONG_POSITIONS, dtype=torch.float64).round().long()
    return torch.tensor(sorted({*range(32), *far.tolist(), length - 1}))


def scale_of(turns: Sequence[Turn]) -> float:
    """|after| / |before|, where that is one number for all tokens and heads; 1 otherwise."""
    ratios = torch.cat([(t.after.norm(dim=-1) / t.before.norm(dim=-1).clamp_min(1e-300)).flatten() for t in turns])
    mean = float(ratios.mean())
    return mean if float(ratios.std()) < EVEN * mean else 1.0


def q_over_k(evidence: Evidence) -> float:
    """By how much q grows more than k on the way to the scores: 1, or the scale, where it is put on q."""
    turns = {name: turns_of(evidence, list(evidence.short_probes()), (name,)) for name in ("q", "k")}
    if not all(turns.values()):
        return 1.0
    ratio = scale_of(turns["q"]) / scale_of(turns["k"])
    return 1.0 if abs(ratio - 1) < EVEN else ratio


def is_unrotated(turns: Sequence[Turn]) -> bool:
    """Whether nothing moves but, perhaps, by one common factor: no component for itself, however small it is beside others."""
    before, after = (torch.cat([getattr(turn, side).flatten(0, 1) for turn in turns]) for side in ("before", "after"))
    factor = float((before * after).sum() / before.square().sum().clamp_min(1e-300))
    change = (after - factor * before).square().sum(0)
    return bool((change <= STILL**2 * after.square().sum(0)).all())


def layout_of(turns: Sequence[Turn]) -> Layout | str:
    """The rotated components and their pairing, or why there is none."""
    moved = _moved(turns)
    if int(moved.sum()) < 2:
        return "fewer than two components move"
    first = int(moved.nonzero()[0])
    partner, share, runner_up = partner_of(turns, first)
    if share > ROTATES or runner_up < 4 * share:
        return f"no pair of components rotates: the best leaves {share:.2g} unexplained, the next {runner_up:.2g}"
    if partner != 1:
        return Layout(pairing="half", first=first, d_rot=2 * partner)
    count = int(moved.nonzero()[-1]) - first + 1
    narrow = any_narrow(torch.cat([turn.before.flatten() for turn in turns[:3]]))
    return Layout(pairing="adjacent", first=first, d_rot=count + count % 2, exact=not narrow)


def _moved(turns: Sequence[Turn]) -> Tensor:
    """`[d_head]` True where some token's component changes."""
    scale = scale_of(turns)
    still = [(turn.after == turn.before).all(0).all(0) for turn in turns]
    if abs(scale - 1) < EVEN:
        return ~torch.stack(still).all(0)
    change = torch.stack([(turn.after - scale * turn.before).abs().amax((0, 1)) for turn in turns]).amax(0)
    size = torch.stack([turn.after.abs().amax((0, 1)) for turn in turns]).amax(0)
    return change > 1e-6 * size


def partner_of(turns: Sequence[Turn], first: int) -> tuple[int, float, float]:
    """How far the partner of a component is, its unexplained share, and the runner-up's.

    The share is that of what the two components change by: beside a component that outweighs all others and hardly turns,
    as attention sinks have them, every other one would seem to rotate.
    """
    width = turns[0].before.shape[-1] - first - 1
    cost, change = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for turn in turns:
        moving = turn.position >= 1
        x, y = turn.before[moving][..., first:], turn.after[moving][..., first:]
        a = torch.complex(x[..., :1].expand_as(x[..., 1:]), x[..., 1:])
        b = torch.complex(y[..., :1].expand_as(y[..., 1:]), y[..., 1:])
        factor = (a.conj() * b).sum(1) / (a.abs().square().sum(1)).clamp_min(1e-300)
        unit = factor / factor.abs().clamp_min(1e-300) * b.abs().norm(dim=(0, 1)) / a.abs().norm(dim=(0, 1))
        cost += (b - unit[:, None] * a).abs().square().sum((0, 1))
        change += (b - a).abs().square().sum((0, 1))
    share = (cost / change.clamp_min(1e-300)).sqrt()
    best = int(share.argmin())
    others = torch.cat([share[:best], share[best + 1 :]])
    return best + 1, float(share[best]), float(others.min()) if others.numel() else math.inf


def paired(x: Tensor, layout: Layout) -> Tensor:
    """Complex pairs `[pos head pair]` of the rotated components."""
    own = x[..., layout.first : layout.first + layout.d_rot]
    half = layout.d_rot // 2
    if layout.pairing == "adjacent":
        return torch.complex(own[..., 0::2].contiguous(), own[..., 1::2].contiguous())
    return torch.complex(own[..., :half].contiguous(), own[..., half:].contiguous())
