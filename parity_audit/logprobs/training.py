"""What a mismatch does to training: clipped tokens, truncated importance weights, effective sample size per batch."""

from __future__ import annotations

import numpy as np

from parity_audit.core.logprob_report import TrainingEffect
from parity_audit.logprobs.metrics import effective_share, sequence_ratios
from parity_audit.logprobs.paired import Array, Paired

EPSILON = 0.2
"""PPO's and GRPO's usual clipping range of the importance ratio."""
TRUNCATION = 2.0
"""The usual upper bound of truncated importance sampling."""
BATCH = 64
"""Sequences of one batch: a common size, which makes figures of two runs comparable."""


def training_effect(pair: Paired, *, batch: int = BATCH) -> TrainingEffect:
    """What happens on the first, fully on-policy step, where every ratio should be 1.

    `clipped` counts ratios outside [1 - 0.2, 1 + 0.2]; `truncated` those above 2. The effective sample size is that of
    sequence ratios, averaged over consecutive batches; with fewer sequences than a batch holds it is of all of them.
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
    """Whole batches only, unless there is no whole one."""
    count = len(ratios) // size
    return [ratios] if count == 0 else np.split(ratios[: count * size], count)
