"""Build the parts of the report from paired legs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from parity_audit.core.logprob_report import (
    Divergence,
    FirstDivergence,
    Flips,
    PairReport,
    PresetRow,
    TokenRow,
    TokenTable,
)
from parity_audit.core.rollouts import Completion
from parity_audit.logprobs import tails
from parity_audit.logprobs.intervals import intervals
from parity_audit.logprobs.metrics import METRICS, all_metrics
from parity_audit.logprobs.paired import Array, Paired
from parity_audit.logprobs.profiles import Alarm, profile
from parity_audit.logprobs.training import training_effect

WORST = 20


def pair_report(pair: Paired, *, rollout: str, train: str, meaning: str) -> PairReport:
    """Return every metric of two legs; a metric that is not finite on these tokens (a constant side) is left out."""
    return PairReport(
        rollout=rollout, train=train, meaning=meaning, tokens=len(pair.rollout), sequences=pair.sequences,
        metrics={name: value for name, value in all_metrics(pair).items() if math.isfinite(value)},
        intervals=intervals(pair), quantiles=tails.quantiles(pair),
        extreme_shares={f"{tau:g}": share for tau, share in tails.extreme_shares(pair).items()},
        by_probability=tails.by_probability(pair), by_position=tails.by_position(pair), by_sequence=tails.by_sequence(pair),
        histogram=tails.histogram(pair), training=training_effect(pair),
    )  # fmt: skip


def preset(name: str, pair: Paired) -> tuple[PresetRow, ...]:
    """Return the metrics of one framework under its own keys."""
    rows = []
    for row in profile(name):
        value = METRICS[row.metric].of(pair)
        raised = row.alarm is not None and row.alarm.raised_by(value)
        if math.isfinite(value):
            rows.append(
                PresetRow(key=row.key, value=value, formula=row.formula, alarm=_words(row.alarm), raised=raised)
            )
    return tuple(rows)


def _words(alarm: Alarm | None) -> str:
    if alarm is None:
        return ""
    low = f"below {alarm.low:g}" if math.isfinite(alarm.low) else ""
    high = f"above {alarm.high:g}" if math.isfinite(alarm.high) else ""
    return f"{' or '.join(bound for bound in (low, high) if bound)} ({alarm.source})"


def worst_rows(pair: Paired, completions: Sequence[Completion], judge: Array | None) -> tuple[TokenRow, ...]:
    """Return the `WORST` tokens with the largest difference."""
    return tuple(
        TokenRow(
            sequence=int(pair.sequence[index]), position=int(pair.position[index]),
            token_id=completions[int(pair.sequence[index])].token_ids[int(pair.position[index])], text="",
            rollout=float(pair.rollout[index]), train=float(pair.train[index]),
            judge=None if judge is None else float(judge[index]),
        )
        for index in tails.worst_tokens(pair, WORST)
    )  # fmt: skip


def token_table(pair: Paired, completions: Sequence[Completion]) -> TokenTable:
    """Return every token of a pair, as columns."""
    return TokenTable(
        sequence=tuple(pair.sequence.tolist()), position=tuple(pair.position.tolist()),
        token_id=tuple(token for one in completions for token in one.token_ids), rollout=tuple(pair.rollout.tolist()),
        train=tuple(pair.train.tolist()),
    )  # fmt: skip


def flips(ours: Sequence[int], theirs: Sequence[int], margin: Array, moved: float) -> Flips:
    """Count the places where two legs rank another token first.

    `margin` `[token]` is the judge's difference of its two largest logits, `moved` the largest |d| of the legs. The first
    rank changes if two logits move towards each other by the margin, so a margin up to twice `moved` counts as a tie.
    """
    changed = np.array([a != b for a, b in zip(ours, theirs, strict=True)])
    ties = changed & (margin <= 2.0 * moved)
    return Flips(
        tokens=int(changed.sum()), ties=int(ties.sum()), confident=int((changed & ~ties).sum()),
        worst_margin=float(margin[changed].max()) if changed.any() else 0.0,
    )  # fmt: skip


def divergence(completions: Sequence[Completion], theirs: Sequence[int], margin: Array, moved: float) -> Divergence:
    """Return where each greedy completion first differs from the judge's likeliest token, given the same tokens before.

    `theirs` (likeliest tokens) and `margin` are the judge's, `[token]`. `moved` is the largest |d| of the legs; ties are
    defined as in `flips`.
    """
    found, start = [], 0
    for sequence, one in enumerate(completions):
        for position, token in enumerate(one.token_ids):
            place = start + position
            if token != theirs[place]:
                own = float(margin[place])
                found.append(
                    FirstDivergence(
                        sequence=sequence, position=position, token_id=token, judge_token_id=theirs[place], margin=own,
                        tie=own <= 2.0 * moved,
                    )
                )  # fmt: skip
                break
        start += len(one.token_ids)
    return Divergence(sequences=len(completions), first=tuple(sorted(found, key=lambda one: one.position)))
