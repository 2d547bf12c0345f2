"""Compare the logits of both sides as distributions: sums over every position, and the tokens that differ most."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from parity_audit.compare.divergences import kl_per_position, top1_matches
from parity_audit.compare.outputs import OUTPUTS, deciding_items
from parity_audit.core.limits import TINY
from parity_audit.core.report import LogitsDelta, SiteDelta, TokenLogits
from parity_audit.core.types import Probe

SHOWN = 12
"""Number of tokens that a report lists: enough to show a pattern, few enough to keep its JSON small."""


class LogitsSums:
    """Running sums of the distribution metrics over real positions of every probe, and the tokens that differ most."""

    def __init__(self) -> None:
        self.positions = 0
        self.kl = 0.0
        self.top1 = 0
        self.abs_sum = 0.0
        self.square_sum = 0.0
        self.reference_square_sum = 0.0
        self.entries = 0
        self.worst: list[TokenLogits] = []

    def add(self, probe: Probe, offset: int, candidate: Tensor, reference: Tensor, keep: Tensor) -> None:
        """Add logits `[batch, pos, d_vocab]` from position `offset` on, where `keep` `[batch, pos]` is True.

        Positions with a number that is not finite are left out here; the verdict counts them separately.
        """
        ours, theirs = candidate[keep].double(), reference[keep].double()
        finite = ours.isfinite().all(-1) & theirs.isfinite().all(-1)
        ours, theirs = ours[finite], theirs[finite]
        if ours.numel() == 0:
            return
        self.positions += ours.shape[0]
        divergence = kl_per_position(theirs, ours)
        self.kl += float(divergence.sum())
        self.top1 += top1_matches(theirs, ours)
        delta = ours - theirs
        self._rank(probe, keep.nonzero()[finite] + torch.tensor([0, offset]), delta, divergence, ours, theirs)
        self.entries += delta.numel()
        self.abs_sum += float(delta.abs().sum())
        self.square_sum += float(delta.square().sum())
        self.reference_square_sum += float(theirs.square().sum())

    def result(self, deltas: list[SiteDelta]) -> LogitsDelta | None:
        """The summary, or None if no logits were compared."""
        own = [delta for delta in deciding_items(deltas) if delta.site in OUTPUTS]
        if not own or not self.entries:
            return None
        ratios = [delta.noise_ratio for delta in own if delta.noise_ratio is not None]
        return LogitsDelta(
            max_abs=max(delta.max_abs for delta in own),
            mean_abs=self.abs_sum / self.entries,
            rmse=math.sqrt(self.square_sum / self.entries),
            rel=math.sqrt(self.square_sum / max(self.reference_square_sum, TINY)),
            noise_ratio=max(ratios) if ratios else None,
            kl=self.kl / self.positions,
            top1_agreement=self.top1 / self.positions,
        )

    def worst_tokens(self) -> tuple[TokenLogits, ...]:
        """The tokens with the largest difference of a logit; empty if nothing differs."""
        return tuple(self.worst)

    def _rank(
        self, probe: Probe, places: Tensor, delta: Tensor, divergence: Tensor, ours: Tensor, theirs: Tensor
    ) -> None:  # fmt: skip
        """Keep the tokens that differ most, of these and the earlier ones. `places` `[token, 2]` are row and position."""
        furthest, at = delta.abs().max(-1)
        for index in furthest.topk(min(SHOWN, len(furthest))).indices.tolist():
            row, position = places[index].tolist()
            if furthest[index] > 0:
                self.worst.append(
                    TokenLogits(
                        probe=probe.name, row=row, position=probe.kept[position] if probe.kept else position,
                        token_id=probe.token_ids[row][position],
                        max_abs=float(furthest[index]), at_id=int(at[index]), kl=float(divergence[index]),
                        reference_id=int(theirs[index].argmax()), candidate_id=int(ours[index].argmax()),
                    )
                )  # fmt: skip
        self.worst = sorted(self.worst, key=lambda one: -one.max_abs)[:SHOWN]
