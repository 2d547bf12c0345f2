"""Decide in which shape tensors of several captures are compared, and report those that cannot be.

A side that ran fewer positions of a probe records that in its own probe (see `capture.take`). The other sides are cut
to these positions, because the first positions of a causal model do not depend on later ones. Logits with another
vocabulary size are compared in the columns that both sides have; columns beyond the vocabulary are reported, and the
probability that they get is measured. Any other difference of shape is a misfit.
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
"""Probability up to which columns beyond the vocabulary count as padding; a column of -inf, or of the lowest number of
a dtype, gets 0."""
POSITIONS_AT_A_TIME = 64
SAME_IN_EVERY_ROW = ("pos_embed",)
"""Sites that depend only on positions: programs that are not given positions compute them once for the whole batch."""


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A site of the candidate whose shape differs from the reference's on the same tokens."""

    probe: str
    site: str
    found: tuple[int, ...]
    expected: tuple[int, ...]
    beyond: float = 0.0

    @property
    def only_vocabulary(self) -> bool:
        """Whether the tensor is an output that can be compared in the columns that both sides have."""
        return self.site in OUTPUTS and self.found[:-1] == self.expected[:-1]

    @property
    def words(self) -> str:
        """The two shapes, in words; for a wider vocabulary also the probability that its extra columns get."""
        who = "the model returned" if self.site == RETURNED else f"{self.site} is"
        said = f"{who} {list(self.found)} where the reference has {list(self.expected)} (probe {self.probe})"
        extra = self.found[-1] - self.expected[-1]
        if not self.only_vocabulary:
            return said
        if extra < 0:
            return f"{said}: the last {-extra} tokens of the vocabulary have no logit"
        return f"{said}: {extra} columns beyond the vocabulary get up to {self.beyond:.2g} of the probability"

    def gap(self) -> NotTested:
        """The gap in the comparison that this misfit causes."""
        return NotTested(what=f"{self.probe}/{self.site}", why=self.words)


def positions_run(source: TensorSource, probe: str) -> int | None:
    """The number of positions of a probe that a side ran; None if it did not run the probe."""
    return next((own.shape[1] for own in source.probes if own.name == probe), None)


def position_axes(site: str) -> tuple[int, ...]:
    """The axes of a site that are positions."""
    return (2, 3) if site.endswith(ATTENTION_SITES) else (1,)


def common_shape(sides: Sequence[TensorSource], probe: str, site: str) -> tuple[int, ...] | Misfit:
    """The shape in which all sides can be compared; if there is none, the misfit between the first two sides."""
    run = [positions_run(side, probe) for side in sides]
    reach = min((count for count in run if count is not None), default=0)
    shapes = [_cut(side.shape(probe, site), site, own, reach) for side, own in zip(sides, run, strict=True)]
    columns = min(shape[-1] for shape in shapes)
    compared = {_compared(shape, shapes[1], site, columns) for shape in shapes}
    if len(compared) > 1:
        return Misfit(probe=probe, site=site, found=shapes[0], expected=shapes[1])
    return compared.pop()


def _cut(shape: tuple[int, ...], site: str, own: int | None, reach: int) -> tuple[int, ...]:
    """The shape after positions beyond the common ones are left out; axes whose size is not the number of positions
    stay."""
    axes = [axis for axis in position_axes(site) if axis < len(shape) and shape[axis] == own]
    return tuple(reach if axis in axes else size for axis, size in enumerate(shape))


def _compared(found: tuple[int, ...], wanted: tuple[int, ...], site: str, columns: int) -> tuple[int, ...]:
    """The shape that is compared: for outputs, the columns that all sides have; a single row of positions counts for
    every row."""
    if site in OUTPUTS:
        return (*found[:-1], columns)
    if site in SAME_IN_EVERY_ROW and found[0] == 1:
        return (wanted[0], *found[1:])
    return found


def clipped(tensor: Tensor, common: tuple[int, ...]) -> Tensor:
    """A chunk of rows, cut or expanded to the common shape; axis 1 was already cut when the rows were read."""
    if tensor.shape[0] != common[0]:
        tensor = tensor.expand(common[0], *tensor.shape[1:])
    for axis in range(2, tensor.ndim):
        tensor = tensor.narrow(axis, 0, common[axis])
    return tensor


def shape_difference(sides: Sequence[TensorSource], probe: Probe, site: str) -> Misfit | NotTested | None:
    """Why a site of the first side cannot be compared with the second's, or which columns are left out.

    None if the whole site can be compared.
    """
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
    """The largest probability that columns beyond `d_vocab` get together at a real token."""
    worst, length = 0.0, source.shape(probe.name, site)[1]
    mask = torch.tensor(probe.mask, dtype=torch.bool)
    for start in range(0, length, POSITIONS_AT_A_TIME):
        logits = source.rows(probe.name, site, start, min(start + POSITIONS_AT_A_TIME, length)).double()
        real = logits[mask[:, start : start + logits.shape[1]]]
        if len(real):
            worst = max(worst, float(real.softmax(-1)[:, d_vocab:].sum(-1).max()))
    return worst
