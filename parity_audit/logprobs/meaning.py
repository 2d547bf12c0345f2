"""Decide which quantity an engine's log-probabilities are (their "meaning"), before they are compared with a trainer's.

Depending on engine, release and settings, the same call returns the log-probability before temperature (raw), after
temperature, or after temperature and renormalised over the tokens that top-k and top-p keep (processed). The trainer's side
computes each of these from its own logits. The engine's meaning is the one that differs from the engine's numbers least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity_audit.core.rollouts import Sampling
from parity_audit.logprobs.paired import Array

CLEAR = 3.0
"""The RMSE of the best meaning must be this many times smaller than that of the next, else these tokens cannot decide."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A quantity: the temperature of the distribution, and whether it is renormalised over the tokens that sampling keeps."""

    temperature: float
    truncated: bool = False

    @property
    def words(self) -> str:
        """Return the quantity as the report calls it."""
        whole = "over the tokens that top-k and top-p keep" if self.truncated else "over the whole vocabulary"
        return f"log-probability at temperature {self.temperature:g} {whole}"


RAW = Meaning(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The meaning with the smallest RMSE, and `left`: the RMSE in nats of every meaning that was tried, the best first.

    `clear` is False if another meaning is nearly as close (see `CLEAR`).
    """

    meaning: Meaning
    clear: bool
    left: tuple[tuple[Meaning, float], ...]


def policy(sampling: Sampling) -> Meaning:
    """Return the quantity that a trainer computes: at the sampling temperature (1 for greedy), over the whole vocabulary."""
    return Meaning(temperature=sampling.temperature or 1.0)


def meanings(sampling: Sampling) -> tuple[Meaning, ...]:
    """Return the quantities that an engine may return for these settings, without duplicates."""
    tempered = policy(sampling)
    cut = (Meaning(temperature=tempered.temperature, truncated=True),) if sampling.truncates else ()
    return tuple(dict.fromkeys((RAW, tempered, *cut)))


def decide(engine: Array, by_meaning: Mapping[Meaning, Array]) -> Decided:
    """Rank meanings by the RMSE between their values and the engine's log-probabilities, both `[token]`."""
    left = [(meaning, float(np.sqrt(np.square(engine - values).mean()))) for meaning, values in by_meaning.items()]
    left.sort(key=lambda pair: pair[1])
    clear = len(left) < 2 or left[0][1] * CLEAR <= left[1][1]
    return Decided(meaning=left[0][0], clear=clear, left=tuple(left))


def columns(
    temperatures: Sequence[float], rows: Sequence[Array], log_kept: Array | None, wanted: Sequence[Meaning]
) -> dict[Meaning, Array]:
    """Return the trainer's own values of each meaning, `[token]`.

    `rows[i]` `[token]` are the log-probabilities at `temperatures[i]`. `log_kept` `[token]` is the logarithm of the
    probability that top-k and top-p keep.
    """
    at = dict(zip(temperatures, rows, strict=True))
    found = {}
    for meaning in wanted:
        if meaning.temperature in at and (not meaning.truncated or log_kept is not None):
            values = at[meaning.temperature]
            found[meaning] = values - log_kept if meaning.truncated and log_kept is not None else values
    return found
