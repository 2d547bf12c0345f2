"""The data from which every metric is computed: two log-probabilities of each sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parity_audit.core.errors import NotJudged

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
ROUNDING_ABOVE_ONE = 1e-3
"""A log-probability may exceed zero by rounding (bfloat16 engines); a larger number is not a log-probability."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Sampled tokens of all sequences, one after another: `rollout`, `train`, `sequence`, `position` are `[token]`.

    `rollout` and `train` are log-probabilities in nats of the sampled token under the engine and under the trainer;
    `sequence` is the number of the token's completion, from 0, `position` its place in the completion, from 0. Prompt tokens
    and padding are left out.
    """

    rollout: Array
    train: Array
    sequence: Indices
    position: Indices

    @property
    def difference(self) -> Array:
        """Return train - rollout, in nats; its exponential is the importance ratio of a token."""
        return self.train - self.rollout

    @property
    def sequences(self) -> int:
        """Return the number of completions."""
        return int(self.sequence[-1]) + 1

    def sums(self, values: Array) -> Array:
        """Return the sum of a quantity over the tokens of each sequence, `[sequence]`."""
        return np.asarray(np.bincount(self.sequence, weights=values, minlength=self.sequences), dtype=np.float64)

    def means(self, values: Array) -> Array:
        """Return the mean of a quantity over the tokens of each sequence, `[sequence]`."""
        return self.sums(values) / self.lengths

    @property
    def lengths(self) -> Array:
        """Return the number of tokens of each sequence, `[sequence]`."""
        return np.asarray(np.bincount(self.sequence, minlength=self.sequences), dtype=np.float64)


def paired(
    rollout: Sequence[Sequence[float]], train: Sequence[Sequence[float]], *, who: str = "the two legs"
) -> Paired:
    """Join the sequences of two legs to one array per leg; sequences without a token are left out.

    Raises:
        NotJudged: there is no token, the legs differ in the number of sequences or of tokens in a sequence, or a
            log-probability is NaN, infinite or positive.
    """
    if len(rollout) != len(train):
        raise NotJudged(
            f"{who} have {len(rollout)} and {len(train)} sequences", code="different-rollouts",
            hint="score the same completions on both legs",
        )  # fmt: skip
    for number, (ours, theirs) in enumerate(zip(rollout, train, strict=True)):
        if len(ours) != len(theirs):
            raise NotJudged(
                f"{who} have {len(ours)} and {len(theirs)} tokens in sequence {number}", code="different-rollouts",
                hint="score the same token ids on both legs; a leg that stops early or drops EOS is not comparable",
            )  # fmt: skip
    kept = [number for number, ours in enumerate(rollout) if len(ours)]
    if not kept:
        raise NotJudged(
            f"{who} have no sampled token in common", code="no-tokens", hint="look at the rollouts' lengths"
        )
    lengths = [len(rollout[number]) for number in kept]
    pair = Paired(
        rollout=_joined([rollout[number] for number in kept]),
        train=_joined([train[number] for number in kept]),
        sequence=np.repeat(np.arange(len(kept)), lengths),
        position=np.concatenate([np.arange(length) for length in lengths]),
    )
    _check(pair.rollout, pair, "rollout")
    _check(pair.train, pair, "train")
    return pair


def _joined(rows: Sequence[Sequence[float]]) -> Array:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def _check(values: Array, pair: Paired, leg: str) -> None:
    for wrong, words in ((~np.isfinite(values), "is not finite"), (values > ROUNDING_ABOVE_ONE, "is positive")):
        if wrong.any():
            first = int(np.argmax(wrong))
            raise NotJudged(
                f"{int(wrong.sum())} of {len(values)} log-probabilities of the {leg} leg cannot be compared: the first "
                f"({values[first]}) {words}",
                code="bad-logprob", where=f"sequence {pair.sequence[first]}, token {pair.position[first]}",
                hint="a token that a leg excludes (top-p, top-k, a bad mask) has no log-probability there",
            )  # fmt: skip
