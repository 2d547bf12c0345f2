"""Fit values of a knob with several numbers: one number per query head, or one bias per distance between query and key.

Such values have more freedom than any other. They are therefore tried only where no single value explains a site, and
rank last among the explanations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from parity_audit.core.sites import local_name
from parity_audit.diagnose.agreement import is_number
from parity_audit.diagnose.fit.residuals import Component, Residuals, Values
from parity_audit.diagnose.fit.search import DIGITS, Difference, Fitted, at_value, gauss_newton
from parity_audit.diagnose.thresholds import ALIKE
from parity_audit.formulas.attention import consecutive
from parity_audit.formulas.choices import AT_DISTANCE
from parity_audit.formulas.knob import COUNT, Knob


def one_per_head(row: Knob, difference: Difference, start: Any, heads: int, kv_heads: int) -> Iterator[Fitted]:
    """Yield values of a knob with one entry per query head: fitted numbers, or, for a whole-number knob, the key-value
    head that each query head reads.

    Args:
        row: the knob.
        difference: formula minus capture for a value of the knob, None where the value is impossible.
        start: the single value with the smallest residual; the fit starts from it in every head.
        heads: the number of query heads.
        kv_heads: the number of key-value heads.
    """
    if row.kind == COUNT:
        yield from _maps(difference, heads, kv_heads)
        return
    first = float(start) if is_number(start) else 0.0
    numbers, _ = gauss_newton(lambda values: difference(list(values)), [first] * heads, [False] * heads)
    yield at_value(difference, list(numbers))


def _maps(difference: Difference, heads: int, kv_heads: int) -> Iterator[Fitted]:
    """Yield three fitted maps from query heads to key-value heads: for keys and values together, for keys alone and
    for values alone."""
    usual = consecutive(heads, kv_heads)
    yield at_value(difference, _map(difference, usual, kv_heads))
    for part, other in (("k", "v"), ("v", "k")):

        def of_part(heads: Any, part: str = part, other: str = other) -> dict[str, Any]:
            return {part: heads, other: usual}

        yield at_value(difference, of_part(_map(lambda value: difference(of_part(value)), usual, kv_heads)))


def _map(difference: Difference, usual: Sequence[int], kv_heads: int) -> list[int]:
    """Return the fitted key-value head of each query head. Each query head is searched separately, because none
    depends on another."""
    chosen = list(usual)
    for head in range(len(chosen)):
        tries = [at_value(difference, [*chosen[:head], kv, *chosen[head + 1 :]]) for kv in range(kv_heads)]
        chosen = min(tries, key=lambda one: one.residual).value
    return chosen


def biases_by_distance(residuals: Residuals, parts: Sequence[Component], values: Values) -> list[dict[str, float]]:
    """Return the mean error of the captured scores at each distance between query and key, over heads and queries.

    Each returned dictionary holds the same biases, rounded to a different number of significant digits (`DIGITS`). The
    list is empty where the site is not `attn_scores`, where a tensor is missing, or where the scores have no error.
    """
    if any(local_name(part.site) != "attn_scores" for part in parts):
        return []
    longest = max(part.probe.shape[1] for part in parts)
    sums, counts = torch.zeros(longest, dtype=torch.float64), torch.zeros(longest, dtype=torch.float64)
    for part in parts:
        made, seen = residuals.made(part, values), residuals.captured(part.probe.name, part.site)
        if made is None or seen is None or made.shape != seen.shape:
            return []
        distance = torch.arange(made.shape[-2])[:, None] - torch.arange(made.shape[-1])
        shown = made.isfinite() & seen.isfinite() & (distance >= 0)
        at = distance.expand_as(made)[shown]
        sums.index_add_(0, at, (seen - made)[shown])
        counts.index_add_(0, at, torch.ones_like(at, dtype=torch.float64))
    mean = sums / counts.clamp_min(1)
    biased = (mean.abs() > ALIKE * mean.abs().max()).nonzero()[:, 0].tolist()
    return [{f"{AT_DISTANCE}{at}": float(f"{float(mean[at]):.{few}g}") for at in biased} for few in DIGITS if biased]
