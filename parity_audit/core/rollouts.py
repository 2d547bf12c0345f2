"""Sampled completions and their scores, as the wire and rollout files hold them. Token ids only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.wire import NATIVE


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are sampled. `top_k` 0 and `top_p` 1 keep the whole vocabulary; temperature 0 is greedy.

    With `ignore_eos`, sampling continues after an end-of-sequence token, so that every completion has `max_new_tokens`
    tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1
    seed: int = 0
    max_new_tokens: int = 32
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """Whether some tokens of the vocabulary are excluded from sampling."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion: `logprobs[i]` is the engine's value for `token_ids[i]`, in nats; empty if the engine
    returned none."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Draw `sampling.samples` completions of every prompt."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class SampleReply:
    """Completions in the order of the prompts, the samples of one prompt side by side, and `facts` that the engine
    reported."""

    completions: tuple[Completion, ...]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Changes in how the scoring model is run, compared with how it was loaded.

    `hidden_tokens` are ids that attention does not see (a mask made from ids). Each dtype is that of one step; if
    empty, the step is unchanged: `head_dtype` of the head's product and its result, `rope_dtype` of the rotary tables,
    `router_dtype` of the routers of a mixture of experts, `kv_dtype` of the keys and values that attention reads.
    `attention` is an attention implementation of the engine; `rows` bounds the sequences of one batch (0: no bound).
    """

    hidden_tokens: tuple[int, ...] = ()
    head_dtype: str = ""
    rope_dtype: str = ""
    router_dtype: str = ""
    kv_dtype: str = ""
    attention: str = ""
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Score the tokens of given completions, each from everything before it (teacher forcing).

    `temperatures` are those at which the log-probability is computed. `truncation` (top_p, top_k, temperature), if
    given, also asks for the share of probability that a sampler with those settings keeps. `memory_bytes` bounds the
    logits held at a time. `precision` "float64" is the judge. `decoded` uses the code path of sampling, one token at a
    time from the cache, instead of one pass over all tokens.
    """

    completions: tuple[Completion, ...]
    temperatures: tuple[float, ...] = (1.0,)
    truncation: tuple[float, int, float] | None = None
    memory_bytes: int = 2 << 30
    batch_tokens: int = 8192
    precision: str = NATIVE
    variation: Variation = Variation()
    decoded: bool = False


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one completion's tokens in one leg; every list is `[token]`.

    `logprobs` has one list per requested temperature. `top1` is the likeliest token, `margin` the difference of the two
    largest logits, `log_kept` the logarithm of the probability that truncation keeps. A list is empty if the leg does
    not provide it.
    """

    logprobs: tuple[tuple[float, ...], ...]
    top1: tuple[int, ...] = ()
    margin: tuple[float, ...] = ()
    log_kept: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreReply:
    """Scores in the order of the completions; `facts` records choices made while scoring (chunk and batch sizes)."""

    scores: tuple[Scores, ...]
    facts: dict[str, Any] = field(default_factory=dict)
