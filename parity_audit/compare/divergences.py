"""Distances between next-token distributions, per position, in nats unless a function says otherwise.

Every function takes two tensors `[n, d_vocab]` of logits or log-probabilities (log-softmax leaves log-probabilities as
they are) and returns `[n]` in float64. The work is done in float64 whatever the input's dtype: in bfloat16 the rounding
of the terms is larger than the divergence of two good ports. Tokens that a distribution excludes have -inf and
probability zero. Rows are taken in chunks, so that a vocabulary of 262,144 entries needs a few hundred megabytes at most.

KL is summed as p * (exp(d) - 1 - d) with d = log q - log p. For normalised p and q this equals
sum p * (log p - log q), but every term is at least zero, so nothing cancels: the plain sum has the wrong sign and is off
by orders of magnitude once the divergence nears the rounding of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

CHUNK_ENTRIES = 1 << 22
"""Entries of one chunk of rows: 32 MiB in float64, of which about eight such buffers exist at a time."""
SMALL_LOG_RATIO = 1.0
"""Below this |log q - log p| the expm1 form of a KL term is exact; above it q - p - p*d neither cancels nor overflows."""

Endpoints = Literal["limit", "kl"]


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) = sum p * log(p / q); +inf where q excludes a token that p does not."""
    return _by_rows(_kl_of_log_probs, p, q)


def generalized_jsd(p: Tensor, q: Tensor, beta: float, *, endpoints: Endpoints = "limit") -> Tensor:
    """Generalized Jensen-Shannon divergence beta * KL(p || m) + (1 - beta) * KL(q || m), m = beta * p + (1 - beta) * q.

    The mixture is of probabilities, not of log-probabilities. In on-policy distillation p is the teacher and q the
    student (arXiv 2306.13649, equation 1). At beta = 0 and 1 the divergence is zero (`endpoints="limit"`);
    `endpoints="kl"` gives the limits of JSD / beta and JSD / (1 - beta) instead, KL(p || q) and KL(q || p), as training
    libraries do, which makes the function jump there.

    Raises:
        ValueError: beta outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta of a generalized Jensen-Shannon divergence lies in [0, 1], not {beta}")
    if beta in (0.0, 1.0):
        if endpoints == "kl":
            return kl_divergence(p, q) if beta == 0.0 else kl_divergence(q, p)
        return torch.zeros_like(kl_divergence(p, q))

    def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        return beta * _kl_of_log_probs(log_p, log_m) + (1.0 - beta) * _kl_of_log_probs(log_q, log_m)

    return _by_rows(jsd, p, q)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the sum of |p - q|, between 0 and 1 (no unit)."""
    return _by_rows(lambda log_p, log_q: 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1), p, q)


def hellinger(p: Tensor, q: Tensor) -> Tensor:
    """Hellinger distance sqrt(sum (sqrt p - sqrt q)^2 / 2), between 0 and 1 (no unit)."""

    def distance(log_p: Tensor, log_q: Tensor) -> Tensor:
        return ((0.5 * log_p).exp() - (0.5 * log_q).exp()).square().sum(-1).mul(0.5).sqrt()

    return _by_rows(distance, p, q)


def chi_squared(p: Tensor, q: Tensor) -> Tensor:
    """Sum of (p - q)^2 / q (no unit); +inf where q excludes a token that p does not."""

    def distance(log_p: Tensor, log_q: Tensor) -> Tensor:
        both_excluded = log_p.isneginf() & log_q.isneginf()
        share = torch.where(both_excluded, 0.0, (log_p - log_q).expm1())
        return (share.square() * log_q.exp()).where(~log_q.isneginf() | both_excluded, math.inf).sum(-1)

    return _by_rows(distance, p, q)


def top_k_overlap(p: Tensor, q: Tensor, k: int) -> Tensor:
    """Share of the k most likely tokens of p that are among the k most likely of q, between 0 and 1 (no unit)."""

    def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
        ours, theirs = log_p.topk(k).indices, log_q.topk(k).indices
        return (ours[:, :, None] == theirs[:, None, :]).any(-1).double().mean(-1)

    return _by_rows(overlap, p, q)


def rank_biased_overlap(p: Tensor, q: Tensor, *, persistence: float = 0.9, depth: int = 100) -> Tensor:
    """Extrapolated rank-biased overlap of the rankings by probability (Webber et al. 2010, equation 32), in [0, 1].

    A reader goes on from one rank to the next with probability `persistence`; agreement beyond `depth` is taken to be
    the agreement at `depth`.
    """

    def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
        ranks = min(depth, log_p.shape[-1])
        ours, theirs = log_p.topk(ranks).indices, log_q.topk(ranks).indices
        equal = ours[:, :, None] == theirs[:, None, :]
        common = torch.stack([equal[:, :d, :d].sum((1, 2)) for d in range(1, ranks + 1)], -1).double()
        d = torch.arange(1, ranks + 1, dtype=torch.float64)
        agreement = common / d
        weighted = (agreement * persistence**d).sum(-1) * (1.0 - persistence) / persistence
        return agreement[:, -1] * persistence**ranks + weighted

    return _by_rows(overlap, p, q)


def kl_lower_bound(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Lower bound of KL(p || q) from log-probabilities `[n, k]` of the same k tokens; all other tokens form one bucket.

    Engines return only the top k log-probabilities. Joining outcomes never increases a divergence, so the bound holds
    whatever the tail looks like.

    Raises:
        ValueError: the given probabilities of a row add up to more than 1 (beyond rounding to float32).
    """
    sides = []
    rounding = log_p.shape[-1] * torch.finfo(torch.float64).eps  # of a sum of k terms: a smaller rest counts as this
    for side in (log_p.double(), log_q.double()):
        rest = 1.0 - side.exp().sum(-1, keepdim=True)
        if float(rest.min()) < -1e-5:
            raise ValueError(f"probabilities of the top tokens add up to {1.0 - float(rest.min()):.6g}")
        sides.append(torch.cat([side, rest.clamp_min(rounding).log()], -1))
    return kl_divergence(*sides)


def logit_shift(p_logits: Tensor, q_logits: Tensor) -> tuple[Tensor, Tensor]:
    """The mean difference of the logits (`[n]`), and the largest |difference| that remains after removing it.

    Softmax ignores a constant shift, so only the second number can change a distribution.
    """
    difference = q_logits.double() - p_logits.double()
    shift = difference.mean(-1)
    return shift, (difference - shift[:, None]).abs().amax(-1)


def kl_per_position(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference || candidate) in nats at each position, from logits `[n, d_vocab]`; returns `[n]`."""
    return kl_divergence(reference, candidate)


def top1_matches(reference: Tensor, candidate: Tensor) -> int:
    """Count positions of `[n, d_vocab]` logits where both sides rank the same token first."""
    return int((reference.argmax(-1) == candidate.argmax(-1)).sum())


def _kl_of_log_probs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of normalised float64 log-probabilities; a token that p excludes adds q, as the term does in the limit."""
    p, q = log_p.exp(), log_q.exp()
    ratio = torch.where(log_p.isneginf() & log_q.isneginf(), 0.0, log_q - log_p)
    near = ratio.clamp(-SMALL_LOG_RATIO, SMALL_LOG_RATIO)
    term = torch.where(ratio.abs() <= SMALL_LOG_RATIO, p * (near.expm1() - near), q - p - p * ratio)
    return torch.where(log_p.isneginf(), q, term).sum(-1)


def _by_rows(function: Callable[[Tensor, Tensor], Tensor], p: Tensor, q: Tensor) -> Tensor:
    """Apply a function of normalised log-probabilities to chunks of rows; an empty input gives an empty result."""
    parts = [function(_log_probs(ours), _log_probs(theirs)) for ours, theirs in _chunks(p, q)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _chunks(p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if p.ndim != 2 or p.shape != q.shape:
        raise ValueError(f"two tensors [n, d_vocab] of one shape are needed, not {tuple(p.shape)} and {tuple(q.shape)}")
    rows = max(1, CHUNK_ENTRIES // max(1, p.shape[1]))
    for start in range(0, len(p), rows):
        yield p[start : start + rows], q[start : start + rows]


def _log_probs(values: Tensor) -> Tensor:
    """Normalised log-probabilities in float64.

    Raises:
        ValueError: NaN, +inf, or a row that excludes every token.
    """
    values = values.double()
    if bool((values.isnan() | values.isposinf()).any()):
        raise ValueError("logits hold NaN or +inf")
    if bool(values.isneginf().all(-1).any()):
        raise ValueError("a row of logits excludes every token (-inf everywhere)")
    return torch.log_softmax(values, dim=-1)
