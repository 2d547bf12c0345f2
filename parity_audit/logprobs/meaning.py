"""What quantity an engine's log-probabilities are: decided from the numbers, before any two of them are compared.

The same call returns, depending on engine, release and settings, the log-probability before temperature (raw), after
it, or after temperature and renormalised over the tokens that top-k and top-p keep (processed). The trainer computes
each of these from its own logits; the engine's numbers are the one that leaves only rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity_audit.core.rollouts import Sampling
from parity_audit.logprobs.paired import Array

CLEAR = 3.0
"""The best meaning must leave this many times less than the next, or the two cannot be told apart on these tokens."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A quantity: the temperature of the distribution, and whether it is renormalised over the kept tokens."""

    temperature: float
    truncated: bool = False

    @property
    def words(self) -> str:
        """The quantity as the report calls it."""
        whole = "over the tokens that top-k and top-p keep" if self.truncated else "over the whole vocabulary"
        return f"log-probability at temperature {self.temperature:g} {whole}"


RAW = Meaning(temperature=1.0)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The meaning that leaves least, and the RMSE in nats of every meaning tried, the best first."""

    meaning: Meaning
    clear: bool
    left: tuple[tuple[Meaning, float], ...]


def policy(sampling: Sampling) -> Meaning:
    """What a trainer computes: logits over the sampling temperature, whole vocabulary; greedy decoding counts as 1."""
    return Meaning(temperature=sampling.temperature or 1.0)


def meanings(sampling: Sampling) -> tuple[Meaning, ...]:
    """The quantities that an engine may return for these settings; equal ones once."""
    tempered = policy(sampling)
    cut = (Meaning(temperature=tempered.temperature, truncated=True),) if sampling.truncates else ()
    return tuple(dict.fromkeys((RAW, tempered, *cut)))


def decide(engine: Array, by_meaning: Mapping[Meaning, Array]) -> Decided:
    """Rank meanings by the RMSE that each leaves of the engine's log-probabilities `[token]`."""
    left = [(meaning, float(np.sqrt(np.square(engine - values).mean()))) for meaning, values in by_meaning.items()]
    left.sort(key=lambda pair: pair[1])
    clear = len(left) < 2 or left[0][1] * CLEAR <= left[1][1]
    return Decided(meaning=left[0][0], clear=clear, left=tuple(left))


def columns(
    temperatures: Sequence[float], rows: Sequence[Array], log_kept: Array | None, wanted: Sequence[Meaning]
) -> dict[Meaning, Array]:
    """The trainer's own value of each meaning; `rows[i]` `[token]` is at `temperatures[i]`, `log_kept` `[token]` log S."""
    at = dict(zip(temperatures, rows, strict=True))
    found = {}
    for meaning in wanted:
        if meaning.temperature in at and (not meaning.truncated or log_kept is not None):
            values = at[meaning.temperature]
            found[meaning] = values - log_kept if meaning.truncated and log_kept is not None else values
    return found
