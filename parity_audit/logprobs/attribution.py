"""Find the settings that cause a mismatch: flip every switch alone, then the best ones together, on the same tokens.

With d = trainer - engine in nats, the share that a set of switches explains is 1 - sum d'^2 / sum d^2, where d' is
the difference with the set flipped. It is a share of the squared error, and negative if flipping makes the error larger.
Shares of single switches need not add up, because successive roundings interact. The gains of the growing set add up by
construction. Intervals come from resampling whole sequences.

The set grows by the switch that leaves the smallest squared error, as long as the error becomes clearly smaller. If no single
switch makes it smaller (two roundings that only match together), pairs are tried. Switches that are not needed to reach the
target are dropped at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from parity_audit.core.errors import ParityError, UsageError
from parity_audit.core.logprob_report import Attribution, SwitchEffect
from parity_audit.core.types import NotTested
from parity_audit.logprobs.intervals import FEWEST_SEQUENCES, interval_of, resamples
from parity_audit.logprobs.paired import Array, Indices
from parity_audit.logprobs.switches import BOTH, TRAINER, Switch

Score = Callable[[Mapping[str, Any]], Array]
"""Function that returns the log-probabilities `[token]` of one side with the given settings of that side changed."""
SwitchSet = tuple[Switch, ...]
DEFAULT_TARGET = 0.8
AGAIN = "again"
"""The setting that marks the control run: the engine is run once more without any change."""
CONTROL = Switch(name="nothing: the engine asked again", engine={AGAIN: True})
MOST_PAIRS = 15
"""The largest number of pairs that are tried if no single switch helps: every pair of six switches."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The goal of the proposed set: a share of the squared error that it explains, or the RMSE in nats that remains."""

    share: float | None = DEFAULT_TARGET
    rmse: float | None = None

    @property
    def words(self) -> str:
        """Return the target as the report words it."""
        return f"RMSE {self.rmse:g} nats" if self.rmse is not None else f"{self.share:.0%} of the squared error"

    def reached(self, before: float, after: float) -> bool:
        """Return whether the mean squared error `after` reaches the target, if it was `before` without any switch."""
        if self.rmse is not None:
            return bool(np.sqrt(after) <= self.rmse)
        return self.share is not None and bool(1.0 - after / before >= self.share)


def parse_target(given: float | str | None) -> Target:
    """Parse a target: 0.8 or "80%" is a share of the squared error, "rmse=0.001" is in nats, None means the default.

    Raises:
        UsageError: `given` is none of these, the share is not above 0 and at most 1, or the RMSE is not positive.
    """
    if given is None:
        return Target()
    text = str(given).strip()
    of_rmse = text.startswith("rmse=")
    number = text.removeprefix("rmse=").removesuffix("%")
    try:
        value = float(number) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if of_rmse and 0.0 < value < float("inf") and not text.endswith("%"):
        return Target(share=None, rmse=value)
    if not of_rmse and 0.0 < value <= 1.0:
        return Target(share=value)
    raise UsageError(
        f"`{given}` is no target",
        code="target",
        found=text,
        expected="a share such as 0.8 or 80%, or rmse=0.001 (nats)",
    )


@dataclass
class _ScoredSettings:
    """Scores both sides, once per distinct setting, and keeps the squared errors `[sequence]` of every set that was tried."""

    trainer: Score
    engine: Score
    sequence: Indices
    sides: dict[str, Array] = field(default_factory=dict)
    tried: dict[frozenset[str], Array] = field(default_factory=dict)

    def squares(self, chosen: SwitchSet) -> Array:
        """Return the summed squared error of each sequence with these switches flipped, `[sequence]`."""
        key = frozenset(f"{switch.leg} {switch.name}" for switch in chosen)
        if key not in self.tried:
            d = self._side("trainer", self.trainer, [switch.trainer for switch in chosen])
            d = d - self._side("engine", self.engine, [switch.engine for switch in chosen])
            self.tried[key] = np.asarray(np.bincount(self.sequence, weights=np.square(d)), dtype=np.float64)
        return self.tried[key]

    def _side(self, name: str, score: Score, settings: Sequence[Mapping[str, Any]]) -> Array:
        merged = {key: value for own in settings for key, value in own.items()}
        key = f"{name} {sorted(merged.items(), key=str)}"
        if key not in self.sides:
            self.sides[key] = score(merged)
        return self.sides[key]


def attribute(
    leg: str, sequence: Indices, switches: Sequence[Switch], *, trainer: Score, engine: Score, target: Target,
    repeatable: bool = False,
) -> Attribution:  # fmt: skip
    """Flip every switch alone, then grow the set that reaches the target; `sequence` `[token]` numbers the completions.

    A switch that a side does not support (no router, no such kernel) is reported as not tested, with the side's own error
    message. If the engine can be run again (`repeatable`), one more run of it without any change shows how much of the error
    repeating the run changes by itself.
    """
    bench = _ScoredSettings(trainer, engine, sequence)
    start = bench.squares(())
    tokens = len(sequence)
    if not start.any():
        return Attribution(leg=leg, tokens=tokens, rmse=0.0, target=target.words, reached=True)
    alone, gaps, moving = [], [], []
    for switch in switches:
        try:
            squares = bench.squares((switch,))
        except ParityError as error:
            gaps.append(NotTested(what=f"{switch.name} ({switch.leg})", why=error.message.splitlines()[0]))
            continue
        alone.append(_effect(switch, start, squares, tokens))
        if worth_adding(switch, start, squares):
            moving.append(switch)
    control = _effect(CONTROL, start, bench.squares((CONTROL,)), tokens) if repeatable else None
    steps = _grown(bench, moving, target, tokens)
    chosen = _needed(bench, steps[-1] if steps else (), target, tokens)
    left = bench.squares(chosen)
    return Attribution(
        leg=leg, tokens=tokens, rmse=_rmse(start, tokens), target=target.words,
        alone=tuple(sorted(alone, key=lambda effect: effect.rmse)),
        together=tuple(_effect(some[-1], start, bench.squares(some), tokens) for some in steps),
        proposed=tuple(_effect(switch, start, bench.squares((switch,)), tokens) for switch in chosen),
        share=_share(start, left), interval=_interval(start, left), rmse_left=_rmse(left, tokens),
        reached=target.reached(start.sum() / tokens, left.sum() / tokens), control=control, not_tested=tuple(gaps),
    )  # fmt: skip


def worth_adding(switch: Switch, start: Array, squares: Array) -> bool:
    """Return whether a switch is tried together with others.

    It is if it changes any log-probability and, for switches that restart the engine, makes the squared error smaller.
    """
    return not np.array_equal(squares, start) and (switch.leg == TRAINER or float(squares.sum()) < float(start.sum()))


def _grown(bench: _ScoredSettings, switches: Sequence[Switch], target: Target, tokens: int) -> list[SwitchSet]:
    """Return the growing set after each addition, until it reaches the target or no addition reduces the error."""
    start = bench.squares(())
    chosen: SwitchSet = ()
    found: list[SwitchSet] = []
    while not target.reached(start.sum() / tokens, bench.squares(chosen).sum() / tokens):
        better = _best(bench, chosen, [(one,) for one in switches])
        if better is None:
            better = _best(bench, chosen, list(combinations(switches, 2))[:MOST_PAIRS])
        if better is None:
            break
        found += [(*chosen, *better[: count + 1]) for count in range(len(better))]
        chosen = (*chosen, *better)
    return found


def _best(bench: _ScoredSettings, chosen: SwitchSet, additions: Sequence[SwitchSet]) -> SwitchSet | None:
    """Return the addition to the set that leaves the smallest squared error; None if that is no clear gain.

    A gain is clear if the error becomes smaller, and the lower end of the 95 % interval of the gain is above 0. If two
    additions leave the same error, one that changes a single side is preferred to one that changes both.
    """
    now = bench.squares(chosen)
    left: list[tuple[float, bool, SwitchSet]] = []
    for more in additions:
        if _compatible((*chosen, *more)):
            try:
                left.append((float(bench.squares((*chosen, *more)).sum()), any(one.leg == BOTH for one in more), more))
            except ParityError:
                continue
    if not left:
        return None
    _, _, best = min(left, key=lambda entry: entry[:2])
    after = bench.squares((*chosen, *best))
    low = _interval(now, after)
    return best if after.sum() < now.sum() and (low is None or low[0] > 0.0) else None


def _compatible(chosen: SwitchSet) -> bool:
    """Return whether no two of the switches set the same thing."""
    steps = [step for switch in chosen for step in switch.steps]
    return len(steps) == len(set(steps))


def _needed(bench: _ScoredSettings, chosen: SwitchSet, target: Target, tokens: int) -> SwitchSet:
    """Return the set without the switches that are not needed to reach the target; unchanged if it is not reached."""
    before = bench.squares(()).sum() / tokens
    for switch in chosen:
        fewer = tuple(other for other in chosen if other is not switch)
        if target.reached(before, bench.squares(fewer).sum() / tokens):
            return _needed(bench, fewer, target, tokens)
    return chosen


def _effect(switch: Switch, start: Array, squares: Array, tokens: int) -> SwitchEffect:
    return SwitchEffect(
        name=switch.name, leg=switch.leg, settings=switch.settings, rmse=_rmse(squares, tokens),
        share=_share(start, squares), interval=_interval(start, squares), moves=not np.array_equal(squares, start),
    )  # fmt: skip


def _rmse(squares: Array, tokens: int) -> float:
    return float(np.sqrt(squares.sum() / tokens))


def _share(start: Array, squares: Array) -> float:
    return float(1.0 - squares.sum() / start.sum())


def _interval(start: Array, squares: Array) -> tuple[float, float] | None:
    """Return the 95 % interval of the explained share over resampled sequences; None with too few sequences."""
    if len(start) < FEWEST_SEQUENCES:
        return None
    counts = resamples(len(start))
    before = counts @ start
    kept = before > 0.0
    return interval_of(1.0 - (counts @ squares)[kept] / before[kept])
