"""The legs of one comparison: each leg is one source's log-probabilities of the same sampled tokens, as arrays.

The engine samples (decode leg) and then scores the same ids as prompts (prefill leg). The trainer's side scores them by
teacher forcing, natively and in true float64 (the judge). Only token ids are passed between the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parity_audit.core.errors import NotJudged
from parity_audit.core.rollouts import Completion, Sampling, ScoreReply
from parity_audit.logprobs.meaning import Meaning, columns, meanings
from parity_audit.logprobs.paired import Array, Paired, paired

DECODE, PREFILL, TRAINER, JUDGE = "engine-decode", "engine-prefill", "trainer", "judge"
CACHED_TOKENS = "cached_prompt_tokens"
"""An engine's counter of prompt tokens that it took from its prefix cache."""
FEWEST_TOKENS = 32
"""With fewer tokens the RMSE of rounding errors is uncertain by more than an eighth (1 / sqrt(2 n)), and tails mean nothing."""


@dataclass(frozen=True, kw_only=True)
class LegsUnderTest:
    """The legs under test, by name: log-probabilities `[token]` over all completions.

    For an engine these are its decode and prefill legs. For a rollout file they are its rollout and, if the file has them,
    its trainer's log-probabilities. `prefill_top1` is the token that the prefill leg ranks first, `[token]`; empty if that
    is not known. `facts` are the engine's own counters while it sampled, `prefill_facts` those of its prefill leg, and
    `settings` are the settings that the engine reported.
    """

    completions: tuple[Completion, ...]
    values: dict[str, Array]
    prefill_top1: tuple[int, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    prefill_facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One teacher-forced leg: its log-probabilities in each meaning, its likeliest tokens and their margins, all `[token]`.

    `facts` records the batch and chunk sizes that were used in the end, because they may change the last bits.
    """

    by_meaning: dict[Meaning, Array]
    top1: tuple[int, ...]
    margin: Array
    facts: dict[str, Any] = field(default_factory=dict)


def checked(completions: Sequence[Completion], vocabulary: int) -> tuple[Completion, ...]:
    """Return the completions that have at least one token.

    Raises:
        NotJudged: fewer than `FEWEST_TOKENS` tokens in all, a completion without a prompt, or an id that the model does not
            have.
    """
    kept = tuple(completion for completion in completions if completion.token_ids)
    for number, completion in enumerate(kept):
        if not completion.prompt_ids:
            raise NotJudged(
                f"completion {number} has no prompt: its first token has nothing to be scored from", code="no-prompt",
                hint="every row needs the ids of its prompt, at least one",
            )  # fmt: skip
        largest = max((*completion.prompt_ids, *completion.token_ids))
        if largest >= vocabulary:
            raise NotJudged(
                f"completion {number} holds the token id {largest}, the model has {vocabulary}", code="vocabulary",
                hint="these are ids of another tokenizer, or of a model with more tokens",
            )  # fmt: skip
    tokens = sum(len(completion.token_ids) for completion in kept)
    if tokens < FEWEST_TOKENS:
        raise NotJudged(
            f"{tokens} sampled tokens are too few to compare log-probabilities", code="too-few-tokens",
            expected=f"at least {FEWEST_TOKENS}", hint="more prompts (--prompts), more --samples or --max-new-tokens",
        )  # fmt: skip
    return kept


def flat(rows: Sequence[Sequence[float]]) -> Array:
    """Join the rows of all sequences to one array with one value per token."""
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])


def scored(reply: ScoreReply, temperatures: Sequence[float], sampling: Sampling) -> Scored:
    """Return a reply as arrays; the reply must hold one row of log-probabilities per temperature."""
    rows = [flat([score.logprobs[number] for score in reply.scores]) for number in range(len(temperatures))]
    kept = flat([score.log_kept for score in reply.scores]) if sampling.truncates else None
    return Scored(
        by_meaning=columns(temperatures, rows, kept, meanings(sampling)),
        top1=tuple(token for score in reply.scores for token in score.top1),
        margin=flat([score.margin for score in reply.scores]),
        facts=reply.facts,
    )


def pair(completions: Sequence[Completion], rollout: Array, train: Array, who: str) -> Paired:
    """Return two legs as `Paired`; raises NotJudged if a value cannot be compared."""
    edges = np.cumsum([len(completion.token_ids) for completion in completions])[:-1]
    split = [[part.tolist() for part in np.split(values, edges)] for values in (rollout, train)]
    return paired(*split, who=who)
