"""Log-probabilities of given tokens from hidden states, without holding the logits of all tokens at once.

The head is applied to one chunk of tokens at a time, as large as a memory budget allows. Log-softmax accumulates in
float64 over blocks of the vocabulary. If memory runs out all the same, the chunk size is halved. The size finally used
is recorded, because the number of rows of a matrix product may change the last bits of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from parity_audit.core.errors import is_out_of_memory

VOCAB_BLOCK = 1 << 14
"""Vocabulary columns converted to float64 at a time.

They need rows x 16,384 x 8 bytes, a fraction of the float32 logits of a large vocabulary.
"""
LOGIT_COPIES = 2.5
"""Copies of a chunk's logits that exist at the peak: the product, a soft-capped or scaled copy, and float64 blocks."""
FEWEST_ROWS = 4
"""Smallest chunk, if there are enough tokens: for one to three rows, libraries use other kernels for matrix products."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of given tokens, all in float64 but `top1`.

    `logprobs` is `[temperature token]`, the other tensors are `[token]`: `top1` is the most likely token, `margin` the
    difference between the two largest logits, and `log_kept` the log of the probability that truncation keeps, None if
    no truncation was asked for. `chunk` is the number of rows per chunk that was finally used.
    """

    logprobs: Tensor
    top1: Tensor
    margin: Tensor
    log_kept: Tensor | None
    chunk: int


def score_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    d_vocab: int,
    memory_bytes: int,
    temperatures: tuple[float, ...] = (1.0,),
    truncation: tuple[float, int, float] | None = None,
) -> TokenScores:
    """Score `targets` `[token]` from `hidden` `[token, d_model]`.

    Args:
        hidden: hidden states that predict the targets.
        targets: token ids.
        head: maps hidden states to logits `[token, d_vocab]`.
        d_vocab: number of logits per token.
        memory_bytes: budget for the logits of one chunk.
        temperatures: temperatures at which log-probabilities are computed.
        truncation: `(top_p, top_k, temperature)` for `log_kept`.

    Raises:
        ValueError: the budget is smaller than the logits of four tokens.
    """
    rows = rows_for(memory_bytes, d_vocab, hidden.element_size(), len(targets))
    while True:
        try:
            parts = [
                _score(head(hidden[some]), targets[some], temperatures, truncation)
                for some in _even(len(targets), rows)
            ]
            break
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or rows <= FEWEST_ROWS:
                raise
            rows = max(FEWEST_ROWS, rows // 2)
    logprobs, top1, margin, kept = zip(*parts, strict=True)
    return TokenScores(
        torch.cat(logprobs, 1), torch.cat(top1), torch.cat(margin), torch.cat(kept) if truncation else None, rows
    )


def rows_for(memory_bytes: int, d_vocab: int, element_size: int, tokens: int) -> int:
    """Return how many tokens fit into one chunk under the memory budget.

    Raises:
        ValueError: not even four tokens fit, or all tokens if there are fewer than four.
    """
    per_row = int(d_vocab * element_size * LOGIT_COPIES) + min(VOCAB_BLOCK, d_vocab) * 8
    rows = memory_bytes // per_row
    if rows < min(FEWEST_ROWS, tokens):
        raise ValueError(
            f"a memory budget of {memory_bytes / 2**20:.0f} MiB does not hold the logits of {FEWEST_ROWS} tokens over "
            f"{d_vocab} entries; give at least {FEWEST_ROWS * per_row / 2**20:.0f} MiB"
        )
    return int(min(rows, tokens))


def _even(tokens: int, rows: int) -> list[slice]:
    """Return chunks of nearly equal size, at most `rows` each, so that no short chunk is left at the end."""
    count = max(1, math.ceil(tokens / rows))
    edges = [round(number * tokens / count) for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _score(
    logits: Tensor, targets: Tensor, temperatures: tuple[float, ...], truncation: tuple[float, int, float] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = logits.gather(1, targets[:, None])[:, 0].double()
    logprobs = torch.stack([own / t - log_sum_exp(logits, t) for t in temperatures])
    best = logits.topk(2, dim=1)
    margin = best.values[:, 0].double() - best.values[:, 1].double()
    kept = log_kept(logits, *truncation) if truncation else own
    return logprobs, best.indices[:, 0], margin, kept


def log_sum_exp(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log sum exp(logits / temperature) for each row of `[token, d_vocab]`, accumulated in float64 over blocks."""
    top = logits.amax(1).double() / temperature
    total = torch.zeros_like(top)
    for block in logits.split(VOCAB_BLOCK, dim=1):
        total += (block.double() / temperature - top[:, None]).exp().sum(1)
    return top + total.log()


def log_kept(logits: Tensor, top_p: float, top_k: int, temperature: float) -> Tensor:
    """Return, per token `[token]`, the log of the probability mass that top-k and then top-p keep at a temperature.

    Top-p is applied to the tokens that top-k keeps, in the same order as in vLLM and transformers. It keeps the
    smallest set of most likely tokens whose renormalised probability reaches `top_p`, and at least one token.
    """
    log_p = logits.double() / temperature
    log_p = log_p - log_sum_exp(logits, temperature)[:, None]
    ranked = log_p.sort(dim=1, descending=True).values.exp()
    if top_k > 0:
        ranked = ranked[:, :top_k]
    share = ranked / ranked.sum(1, keepdim=True)
    before = share.cumsum(1) - share
    keep = (before < top_p) if top_p < 1.0 else torch.ones_like(before, dtype=torch.bool)
    keep[:, 0] = True
    return (ranked * keep).sum(1).log()
