"""Compute what a mismatch does to training: clipped tokens, truncated importance weights, effective sample size per batch."""

from __future__ import annotations

import numpy as np

from parity_audit.core.logprob_report import TrainingEffect
from parity_audit.logprobs.metrics import effective_share, sequence_ratios
from parity_audit.logprobs.paired import Array, Paired

EPSILON = 0.2
"""PPO's and GRPO's usual clipping range: ratios outside [1 - 0.2, 1 + 0.2] are clipped."""
TRUNCATION = 2.0
"""The usual upper bound of truncated importance sampling."""
BATCH = 64
"""The number of sequences in a batch: a common size, so that the figures of two runs are comparable."""


def training_effect(pair: Paired, *, batch: int = BATCH) -> TrainingEffect:
    """Return what the mismatch does on the first, fully on-policy step, in which every importance ratio should be 1.

    `clipped` is the share of ratios outside [1 - 0.2, 1 + 0.2], `truncated` the share above 2. The effective sample size is
    that of sequence ratios, averaged over consecutive full batches. If there are fewer sequences than a batch holds, it is
    that of all of them.
    """
    ratio = np.exp(pair.difference)
    return TrainingEffect(
        clipped=float(((ratio < 1.0 - EPSILON) | (ratio > 1.0 + EPSILON)).mean()),
        truncated=float((ratio > TRUNCATION).mean()),
        mean_truncated_weight=float(np.minimum(ratio, TRUNCATION).mean()),
        batch=min(batch, pair.sequences),
        ess_per_batch=float(np.mean([effective_share(part) for part in _batches(sequence_ratios(pair), batch)])),
    )


def _batches(ratios: Array, size: int) -> list[Array]:
    """Split the ratios into full batches, without the rest; if there is no full batch, return all ratios as one."""
    count = len(ratios) // size
    return [ratios] if count == 0 else np.split(ratios[: count * size], count)
