"""The distribution of two legs' differences: quantiles, extreme ratios, groups by probability, position and sequence, worst tokens.

Means over all tokens hide what harms training: low-probability tokens have the largest differences and the largest gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parity_audit.core.logprob_report import Histogram, TokenBin
from parity_audit.logprobs.paired import Array, Paired

QUANTILES = (0.5, 0.9, 0.99, 0.999)
THRESHOLDS = (1.01, 1.05, 1.2, 1.5, 2.0, 5.0)
DECILES = 10
POSITION_BINS = 16
HISTOGRAM_BINS = 24


def quantiles(pair: Paired) -> dict[str, float]:
    """Return the quantiles of |d| over tokens: p50, p90, p99, p99.9."""
    d = np.abs(pair.difference)
    return {f"p{100 * share:g}": float(np.quantile(d, share)) for share in QUANTILES}


def extreme_shares(pair: Paired) -> dict[float, float]:
    """Return F(tau) for every threshold tau: the share of tokens whose ratio max(r, 1/r) exceeds tau."""
    d = np.abs(pair.difference)
    return {tau: float((d > np.log(tau)).mean()) for tau in THRESHOLDS}


def by_probability(pair: Paired) -> tuple[TokenBin, ...]:
    """Summarise |d| by decile of the trainer's probability of the token, the least likely tokens first."""
    edges = np.quantile(np.exp(pair.train), np.linspace(0.0, 1.0, DECILES + 1))
    return _bins(pair, np.exp(pair.train), edges)


def by_position(pair: Paired) -> tuple[TokenBin, ...]:
    """Summarise |d| by position in the completion, in up to sixteen bins of equal width."""
    longest = float(pair.position.max()) + 1.0
    edges = np.unique(np.round(np.linspace(0.0, longest, POSITION_BINS + 1)))
    return _bins(pair, pair.position.astype(np.float64), edges)


def by_sequence(pair: Paired) -> tuple[TokenBin, ...]:
    """Summarise |d| by sequence; `low` and `high` of a bin are the number of its sequence."""
    groups = [np.flatnonzero(pair.sequence == number) for number in range(pair.sequences)]
    return tuple(_bin(pair, tokens, float(number), float(number)) for number, tokens in enumerate(groups))


def histogram(pair: Paired) -> Histogram:
    """Count tokens by |d|, in bins of equal ratio from the smallest |d| above zero to the largest."""
    d = np.abs(pair.difference)
    some = d[d > 0.0]
    if not len(some):
        return Histogram(low=0.0, high=0.0, zeros=len(d))
    low, high = float(some.min()), float(some.max())
    edges = np.geomspace(low, max(high, low * (1.0 + 1e-9)), HISTOGRAM_BINS + 1)
    counts, _ = np.histogram(np.clip(some, edges[0], edges[-1]), edges)
    return Histogram(low=low, high=high, zeros=int((d == 0.0).sum()), counts=tuple(counts.tolist()))


def worst_tokens(pair: Paired, count: int) -> Sequence[int]:
    """Return the indices of the `count` tokens with the largest |d|, the largest first."""
    order: list[int] = np.argsort(-np.abs(pair.difference), kind="stable")[:count].tolist()
    return order


def _bins(pair: Paired, values: Array, edges: Array) -> tuple[TokenBin, ...]:
    """Summarise |d| by `values`, in bins between neighbouring edges.

    The last bin includes its upper edge, and empty bins are left out.
    """
    which = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    groups = [(np.flatnonzero(which == number), number) for number in range(len(edges) - 1)]
    return tuple(_bin(pair, tokens, float(edges[n]), float(edges[n + 1])) for tokens, n in groups if len(tokens))


def _bin(pair: Paired, tokens: np.ndarray, low: float, high: float) -> TokenBin:
    d = np.abs(pair.difference[tokens])
    return TokenBin(
        low=low, high=high, tokens=len(d), mean=float(d.mean()), rmse=float(np.sqrt(np.square(d).mean())),
        largest=float(d.max()),
    )  # fmt: skip
