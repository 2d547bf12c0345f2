"""Confidence intervals by resampling whole sequences: tokens of one sequence are not independent of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from parity_audit.logprobs.paired import Array, Indices, Paired

RESAMPLES = 1000
"""The number of resamples: enough that between seeds the 2.5 % and 97.5 % quantiles move by less than a tenth of the interval."""
LEVEL = 0.95
FEWEST_SEQUENCES = 4
"""The smallest number of sequences for an interval: with fewer there are too few distinct resamples for it to mean anything."""

TERMS: dict[str, tuple[tuple[Callable[[Array, Array], Array], ...], Callable[..., Array]]] = {
    "abs_dlogp_mean": ((lambda a, b: np.abs(b - a),), lambda mean: mean),
    "rmse_dlogp": ((lambda a, b: np.square(b - a),), np.sqrt),
    "k1_rollout_train": ((lambda a, b: a - b,), lambda mean: mean),
    "k3_rollout_train": ((lambda a, b: np.expm1(b - a) - (b - a),), lambda mean: mean),
    "token_mult_prob_error": ((lambda a, b: np.exp(np.abs(b - a)),), lambda mean: mean),
    "abs_dprob_mean": ((lambda a, b: np.abs(np.exp(b) - np.exp(a)),), lambda mean: mean),
    "ess_token": ((lambda a, b: np.exp(b - a), lambda a, b: np.exp(2.0 * (b - a))), lambda m, s: np.square(m) / s),
}
"""The headline metrics as functions of means over tokens, so that all resamples of a metric cost one matrix product per mean."""


def intervals(pair: Paired, *, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Return 95 % bootstrap intervals of the headline metrics; empty with fewer than four sequences."""
    if pair.sequences < FEWEST_SEQUENCES:
        return {}
    counts = resamples(pair.sequences, seed=seed)
    tokens = counts @ pair.lengths
    found = {}
    for name, (terms, combine) in TERMS.items():
        means = [counts @ pair.sums(term(pair.rollout, pair.train)) / tokens for term in terms]
        found[name] = interval_of(combine(*means))
    return found


def resamples(sequences: int, *, seed: int = 0) -> Indices:
    """Return how often each sequence is drawn in each resample, `[resample sequence]`; a seed always gives the same draws."""
    share = np.full(sequences, 1.0 / sequences)
    return np.random.default_rng(seed).multinomial(sequences, share, size=RESAMPLES)


def interval_of(samples: Array | Sequence[float]) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of the samples."""
    low, high = np.quantile(np.asarray(samples), [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    return float(low), float(high)
