"""Which tensors of two captures can be held against each other, and what cannot be is said with its shape.

A side that ran fewer positions of a probe says so in its own probe (see `capture.take`): the others are cut to them, for
a causal model's first positions do not depend on the rest. Logits of another width are compared in the columns that both
have; padding beyond the vocabulary is named, and what it gets of the probability is measured. Anything else is a misfit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity_audit.compare.outputs import OUTPUTS
from parity_audit.compare.source import TensorSource
from parity_audit.core.sites import ATTENTION_SITES, RETURNED
from parity_audit.core.types import NotTested, Probe

NO_MASS = 1e-7
"""Of the probability; what a column of -inf or of the lowest number of a dtype gets is 0."""
POSITIONS_AT_A_TIME = 64
SAME_IN_EVERY_ROW = ("pos_embed",)
"""Sites that depend on positions alone: programs that are given none compute them once for the whole batch."""


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A site of the candidate that has another shape than the reference's on the same tokens."""

    probe: str
    site: str
    found: tuple[int, ...]
    expected: tuple[int, ...]
    beyond: float = 0.0

    @property
    def only_vocabulary(self) -> bool:
        """Whether outputs can be compared in the columns that both sides have."""
        return self.site in OUTPUTS and self.found[:-1] == self.expected[:-1]

    @property
    def words(self) -> str:
        """The two shapes; of a wider vocabulary what its further columns get."""
        who = "the model returned" if self.site == RETURNED else f"{self.site} is"
        said = f"{who} {list(self.found)} where the reference has {list(self.expected)} (probe {self.probe})"
        extra = self.found[-1] - self.expected[-1]
        if not self.only_vocabulary:
            return said
        if extra < 0:
            return f"{said}: the last {-extra} tokens of the vocabulary have no logit"
        return f"{said}: {extra} columns beyond the vocabulary get up to {self.beyond:.2g} of the probability"

    def gap(self) -> NotTested:
        """What was not compared because of it."""
        return NotTested(what=f"{self.probe}/{self.site}", why=self.words)


def positions_run(source: TensorSource, probe: str) -> int | None:
    """How many positions of a probe a side ran; None where it did not run it."""
    return next((own.shape[1] for own in source.probes if own.name == probe), None)


def position_axes(site: str) -> tuple[int, ...]:
    """The axes of a site that count positions."""
    return (2, 3) if site.endswith(ATTENTION_SITES) else (1,)


def common_shape(sides: Sequence[TensorSource], probe: str, site: str) -> tuple[int, ...] | Misfit:
    """The shape in which all sides can be compared; the first side's misfit with the second where there is none."""
    run = [positions_run(side, probe) for side in sides]
    reach = min((count for count in run if count is not None), default=0)
    shapes = [_cut(side.shape(probe, site), site, own, reach) for side, own in zip(sides, run, strict=True)]
    columns = min(shape[-1] for shape in shapes)
    compared = {_compared(shape, shapes[1], site, columns) for shape in shapes}
    if len(compared) > 1:
        return Misfit(probe=probe, site=site, found=shapes[0], expected=shapes[1])
    return compared.pop()


def _cut(shape: tuple[int, ...], site: str, own: int | None, reach: int) -> tuple[int, ...]:
    """The shape after positions beyond the common reach are left out; axes that do not hold every position stay."""
    axes = [axis for axis in position_axes(site) if axis < len(shape) and shape[axis] == own]
    return tuple(reach if axis in axes else size for axis, size in enumerate(shape))


def _compared(found: tuple[int, ...], wanted: tuple[int, ...], site: str, columns: int) -> tuple[int, ...]:
    """The shape as it is compared: columns of the vocabulary that all sides have, one row for all repeated."""
    if site in OUTPUTS:
        return (*found[:-1], columns)
    if site in SAME_IN_EVERY_ROW and found[0] == 1:
        return (wanted[0], *found[1:])
    return found


def clipped(tensor: Tensor, common: tuple[int, ...]) -> Tensor:
    """A chunk of rows in the common shape; axis 1 was cut when the rows were read."""
    if tensor.shape[0] != common[0]:
        tensor = tensor.expand(common[0], *tensor.shape[1:])
    for axis in range(2, tensor.ndim):
        tensor = tensor.narrow(axis, 0, common[axis])
    return tensor


def shape_difference(sides: Sequence[TensorSource], probe: Probe, site: str) -> Misfit | NotTested | None:
    """Why a site of the first side cannot be compared with the second's, or which of its columns are left out."""
    shown = [side for side in sides if site in side.sites(probe.name)]
    common = common_shape(shown, probe.name, site)
    if isinstance(common, Misfit) or site not in OUTPUTS:
        return common if isinstance(common, Misfit) else None
    found, d_vocab = (side.shape(probe.name, site)[-1] for side in shown[:2])
    if found == d_vocab:
        return None
    mass = _beyond_vocabulary(shown[0], probe, site, d_vocab) if found > d_vocab else 0.0
    if mass > NO_MASS or found < d_vocab:
        shapes = (*common[:-1], found), (*common[:-1], d_vocab)
        return Misfit(probe=probe.name, site=site, found=shapes[0], expected=shapes[1], beyond=mass)
    columns = f"columns {d_vocab} to {found - 1} of {site}"
    return NotTested(what=columns, why="padding beyond the reference's vocabulary, which gets no probability")


def _beyond_vocabulary(source: TensorSource, probe: Probe, site: str, d_vocab: int) -> float:
    """The largest probability that columns beyond `d_vocab` get at a real token."""
    worst, length = 0.0, source.shape(probe.name, site)[1]
    mask = torch.tensor(probe.mask, dtype=torch.bool)
    for start in range(0, length, POSITIONS_AT_A_TIME):
        logits = source.rows(probe.name, site, start, min(start + POSITIONS_AT_A_TIME, length)).double()
        real = logits[mask[:, start : start + logits.shape[1]]]
        if len(real):
            worst = max(worst, float(real.softmax(-1)[:, d_vocab:].sum(-1).max()))
    return worst
