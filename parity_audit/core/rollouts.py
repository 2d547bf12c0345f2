"""Sampled completions and what a leg says of them, as the wire and rollout files carry them. Token ids only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.wire import NATIVE


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn. `top_k` 0 and `top_p` 1 keep the whole vocabulary; temperature 0 is greedy.

    `ignore_eos` goes on after an end-of-sequence token, so that every completion has `max_new_tokens` tokens.
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
    """One sampled completion: `logprobs[i]` is what the engine returned for `token_ids[i]`, in nats; empty if nothing."""

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
    """Completions in the order of the prompts, the samples of one prompt side by side; `facts` of the engine beside them."""

    completions: tuple[Completion, ...]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variation:
    """How the model that scores is run otherwise than it was loaded.

    `hidden_tokens` are ids that attention does not see (a mask made from ids). The dtypes are those of one step each, where
    empty leaves the step as it is: `head_dtype` of the head's product and its result, `rope_dtype` of the rotary tables,
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

    `temperatures` asks for the log-probability at each of them; `truncation` (top_p, top_k, temperature) for the share
    of probability that a sampler with those settings keeps. `memory_bytes` bounds the logits held at a time.
    `precision` "float64" is the judge. `decoded` asks for the path that sampling takes, one token at a time from the
    cache, instead of one pass over all of them.
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
    """What one leg says of the tokens of one completion; every list is `[token]`.

    `logprobs` has one list per temperature asked for. `top1` is the likeliest token, `margin` the difference of the two
    largest logits, `log_kept` the logarithm of the probability that truncation keeps. A list is empty where the leg does
    not tell.
    """

    logprobs: tuple[tuple[float, ...], ...]
    top1: tuple[int, ...] = ()
    margin: tuple[float, ...] = ()
    log_kept: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreReply:
    """Scores in the order of the completions; `facts` records what was chosen on the way (chunk and batch sizes)."""

    scores: tuple[Scores, ...]
    facts: dict[str, Any] = field(default_factory=dict)
