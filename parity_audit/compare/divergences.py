"""Distances between next-token distributions, from logits."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_per_position(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(reference || candidate) in nats at each position, from logits `[n, d_vocab]`; returns `[n]`.

    Uses the term-wise non-negative form sum p * (exp(d) - 1 - d) with d = log q - log p. It equals
    sum p * (log p - log q) for normalised p and q, but does not cancel: the plain form is wrong in sign
    and by orders of magnitude once the divergence nears the rounding of its terms.
    """
    log_p = torch.log_softmax(reference.double(), dim=-1)
    log_q = torch.log_softmax(candidate.double(), dim=-1)
    diff = log_q - log_p
    return (log_p.exp() * (torch.expm1(diff) - diff)).sum(-1)


def top1_matches(reference: Tensor, candidate: Tensor) -> int:
    """Count positions of `[n, d_vocab]` logits where both sides rank the same token first."""
    return int((reference.argmax(-1) == candidate.argmax(-1)).sum())
