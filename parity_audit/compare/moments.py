"""Accumulate distances between two or three tensors at one site, chunk by chunk, all in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Moments:
    """Running sums over the real entries of one site. The judge's tensor may be absent; its sums then stay 0."""

    count: int = 0
    abs_sum: float = 0.0
    square_sum: float = 0.0
    reference_square_sum: float = 0.0
    candidate_judge: float = 0.0
    reference_judge: float = 0.0
    judge_square_sum: float = 0.0
    max_abs: float = -1.0
    worst: tuple[int, ...] = ()
    non_finite: int = 0
    hidden_by_one_side: int = 0
    judged: bool = field(default=False)

    def add(self, candidate: Tensor, reference: Tensor, judge: Tensor | None, keep: Tensor, offset: int) -> None:
        """Add one chunk. All tensors have the same shape; `keep` is a boolean mask of that shape, and `offset` is the
        position of the chunk's first row on axis 1 of the whole tensor."""
        if not self._add_finite(candidate, reference, judge, keep, offset):
            self._add_with_gaps(candidate, reference, judge, keep, offset)

    def _add_finite(
        self, candidate: Tensor, reference: Tensor, judge: Tensor | None, keep: Tensor, offset: int
    ) -> bool:
        """Add a chunk in few passes if every kept entry is finite, the common case; else return False and add nothing."""
        count = int(keep.sum())
        whole = count == keep.numel()
        sides = [candidate, reference] + ([judge] if judge is not None else [])
        values = [(side if whole else side.masked_fill(~keep, 0.0)).double().flatten() for side in sides]
        squares = [float(value @ value) for value in values]
        if count == 0 or not all(math.isfinite(square) for square in squares):
            return False
        delta = (values[0] - values[1]).abs_()
        self.count += count
        self.abs_sum += float(delta.sum())
        self.square_sum += float(delta @ delta)
        self.reference_square_sum += squares[1]
        self._note_worst(delta.view(keep.shape), offset)
        if judge is not None:
            self.judged = True
            self.candidate_judge += _square_distance(values[0], values[2])
            self.reference_judge += _square_distance(values[1], values[2])
            self.judge_square_sum += squares[2]
        return True

    def _add_with_gaps(
        self, candidate: Tensor, reference: Tensor, judge: Tensor | None, keep: Tensor, offset: int
    ) -> None:
        """Add a chunk in which some entries are not finite.

        Scores that both sides mask (-inf) are left out; scores that one side masks, and other entries that are not
        finite, are counted.
        """
        finite = candidate.isfinite() & reference.isfinite()
        masked_both = torch.isneginf(candidate) & torch.isneginf(reference)
        masked_one = torch.isneginf(candidate) ^ torch.isneginf(reference)
        self.hidden_by_one_side += int((masked_one & keep).sum())
        self.non_finite += int((~finite & ~masked_both & ~masked_one & keep).sum())
        keep = keep & finite
        count = int(keep.sum())
        if count == 0:
            return
        delta = torch.where(keep, candidate.double() - reference.double(), 0.0).abs()
        self.count += count
        self.abs_sum += float(delta.sum())
        self.square_sum += float(delta.square().sum())
        self.reference_square_sum += float(torch.where(keep, reference.double(), 0.0).square().sum())
        self._note_worst(delta, offset)
        if judge is not None:
            self._add_judge(candidate, reference, judge, keep)

    def _note_worst(self, delta: Tensor, offset: int) -> None:
        peak = int(delta.argmax())
        value = float(delta.flatten()[peak])
        if value > self.max_abs:
            index = [int(i) for i in torch.unravel_index(torch.tensor(peak), delta.shape)]
            index[1] += offset
            self.max_abs, self.worst = value, tuple(index)

    def _add_judge(self, candidate: Tensor, reference: Tensor, judge: Tensor, keep: Tensor) -> None:
        keep = keep & judge.isfinite()
        zero = torch.zeros((), dtype=torch.float64)
        self.judged = True
        self.candidate_judge += float(torch.where(keep, candidate.double() - judge.double(), zero).square().sum())
        self.reference_judge += float(torch.where(keep, reference.double() - judge.double(), zero).square().sum())
        self.judge_square_sum += float(torch.where(keep, judge.double(), zero).square().sum())

    def over(self, floor: Moments) -> Moments:
        """Measure these distances against the distances of another pair of tensors.

        The result has this pair's square distances as the candidate's error, and those of `floor` as the reference's.
        """
        share = self.count / floor.count
        return replace(
            self, judged=True, candidate_judge=self.square_sum, reference_judge=floor.square_sum * share,
            judge_square_sum=floor.reference_square_sum * share,
        )  # fmt: skip

    def mean(self, total: float) -> float:
        """The mean over entries, from a sum over entries."""
        return total / self.count if self.count else math.nan

    def rms(self, square_sum: float) -> float:
        """The root mean square over entries, from a sum of squares over entries."""
        return math.sqrt(square_sum / self.count) if self.count else math.nan


def _square_distance(a: Tensor, b: Tensor) -> float:
    apart = a - b
    return float(apart @ apart)
