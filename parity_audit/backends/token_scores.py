"""Log-probabilities of given tokens from hidden states, without ever holding the logits of all tokens.

The head is applied to a chunk of tokens at a time, as large as a memory budget allows; log-softmax accumulates in
float64 over blocks of the vocabulary. When memory runs out all the same, the chunk is halved and the size finally used
is recorded: the number of rows of a matrix product may change its last bits.
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
"""Columns promoted to float64 at a time: rows x 16,384 x 8 bytes, a fraction of the float32 logits of wide vocabularies."""
LOGIT_COPIES = 2.5
"""Copies of a chunk's logits that exist at the peak: the product, a soft-capped or scaled copy, and float64 blocks."""
FEWEST_ROWS = 4
"""Kernels of matrix products change with one to three rows; no chunk has fewer when there are enough tokens."""


@dataclass(frozen=True)
class TokenScores:
    """Columns `[token]`, `logprobs` `[temperature token]`, all float64 but `top1`; `chunk` is the rows finally used."""

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
    """Score `targets` `[token]` from `hidden` `[token, d_model]`; `head` maps hidden states to logits `[token, d_vocab]`.

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
    """Tokens of one chunk under the budget.

    Raises:
        ValueError: not even four fit.
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
    """Chunks of nearly equal size, at most `rows` each, so that no short one is left over."""
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
    """log sum exp(logits / temperature) of each row `[token, d_vocab]`, accumulated in float64 over blocks of columns."""
    top = logits.amax(1).double() / temperature
    total = torch.zeros_like(top)
    for block in logits.split(VOCAB_BLOCK, dim=1):
        total += (block.double() / temperature - top[:, None]).exp().sum(1)
    return top + total.log()


def log_kept(logits: Tensor, top_p: float, top_k: int, temperature: float) -> Tensor:
    """Logarithm of the probability that top-k, then top-p on what it leaves, keep at a temperature, `[token]`.

    The smallest set of likeliest tokens whose probability reaches `top_p` is kept, at least one token; the same order of
    the two filters as in vLLM and transformers.
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
