"""The result of `parity-audit logprobs`, as logprobs.json holds it. Log-probabilities are in nats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parity_audit.core.report import Verdict
from parity_audit.core.rollouts import Sampling
from parity_audit.core.types import NotTested

LOGPROB_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One source of log-probabilities.

    `name` is engine-decode, engine-prefill, trainer or judge. `meaning` says which quantity its numbers are.
    `rmse_to_judge` is over all tokens; `noise_ratio` divides it by the trainer's rounding, RMSE(trainer, judge).
    """

    name: str
    backend: str
    package: str
    version: str
    settings: dict[str, Any]
    dtype: str
    meaning: str
    rmse_to_judge: float | None = None
    noise_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class TokenBin:
    """Statistics of |train - rollout| over a group of tokens; `low` and `high` bound the quantity that they are
    grouped by."""

    low: float
    high: float
    tokens: int
    mean: float
    rmse: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """One sampled token and its log-probability in each leg.

    `text` is the token decoded, `before` and `after` the text around it; all are empty without a tokenizer.
    """

    sequence: int
    position: int
    token_id: int
    text: str
    rollout: float
    train: float
    judge: float | None = None
    before: str = ""
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class PresetRow:
    """A metric under the name that one framework gives it. `alarm` is the framework's condition for an alarm,
    `raised` whether it holds."""

    key: str
    value: float
    formula: str
    alarm: str = ""
    raised: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingEffect:
    """The effect of the mismatch on training.

    Shares are of sampled tokens. The effective sample size is that of a batch of sequences, as a share of the batch.
    """

    clipped: float
    truncated: float
    mean_truncated_weight: float
    batch: int
    ess_per_batch: float


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Numbers of tokens by |d|: `counts` in bins of equal ratio between `low` and `high` in nats; `zeros` are equal
    to the last bit."""

    low: float
    high: float
    zeros: int
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """The comparison of two legs on the same tokens, in the same quantity (`meaning`)."""

    rollout: str
    train: str
    meaning: str
    tokens: int
    sequences: int
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    quantiles: dict[str, float]
    extreme_shares: dict[str, float]
    by_probability: tuple[TokenBin, ...]
    by_position: tuple[TokenBin, ...]
    by_sequence: tuple[TokenBin, ...]
    histogram: Histogram
    training: TrainingEffect


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Places where two legs rank different tokens first. It is a tie if the judge's two best logits differ by less
    than rounding changes them."""

    tokens: int
    ties: int
    confident: int
    worst_margin: float


@dataclass(frozen=True, kw_only=True)
class FirstDivergence:
    """The first token of a greedy completion that is not the judge's likeliest.

    `margin` is the difference of the judge's two largest logits there; `tie` is whether rounding can exchange them.
    """

    sequence: int
    position: int
    token_id: int
    judge_token_id: int
    margin: float
    tie: bool


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Greedy completions compared with the judge's choice at every step: those that differ, the earliest first."""

    sequences: int
    first: tuple[FirstDivergence, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of running the engine again with the settings of a finding and of the findings before it.

    The RMSE, in nats, is that of the engine's decode leg to the judge, before and after, both at the sampling
    temperature over the whole vocabulary. `ratio` divides the RMSE after by the trainer's rounding. `error` says why
    there is no RMSE after.
    """

    rmse_before: float
    rmse_after: float | None = None
    ratio: float | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineMode:
    """An engine setting that the user chose: the engine's own statement about it, and its leg's RMSE to the trainer
    with and without it.

    `moved` is the largest change of a log-probability, in nats, between the two values; `gap` is why the other value
    was not run.
    """

    name: str
    leg: str
    setting: str
    value: bool
    proof: str
    rmse: float
    other_rmse: float | None
    moved: float | None
    gap: str = ""


@dataclass(frozen=True, kw_only=True)
class LogprobFinding:
    """A named reason why two legs differ, the leg that causes it, and the setting that removes it, if there is one."""

    name: str
    leg: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    hint: str = ""
    verified: Verified | None = None


@dataclass(frozen=True, kw_only=True)
class SwitchEffect:
    """The effect of changing one switch on the squared error of a pair of legs.

    `leg` is trainer, engine or both; `settings` are what to write to make the change. `rmse` is what remains, in nats;
    `share` is the explained share of the squared error, with its 95 % interval over resampled sequences. `moves`:
    whether any log-probability changed at all.
    """

    name: str
    leg: str
    settings: dict[str, Any]
    rmse: float
    share: float
    interval: tuple[float, float] | None = None
    moves: bool = True


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The sources of the mismatch between an engine's leg and the trainer, found by changing switches on the same
    tokens.

    `alone`: each switch by itself, the one that leaves least first. `together`: the growing set of switches, where each
    entry has the numbers of the set so far. `proposed` is the smallest part of that set that reaches the target (all of
    it if `reached` is false); `share`, `interval` and `rmse_left` are those of this part. `control` is the engine run
    once more without any change. Switches that could not be changed are in `not_tested`.
    """

    leg: str
    tokens: int
    rmse: float
    target: str
    alone: tuple[SwitchEffect, ...] = ()
    together: tuple[SwitchEffect, ...] = ()
    proposed: tuple[SwitchEffect, ...] = ()
    share: float = 0.0
    interval: tuple[float, float] | None = None
    rmse_left: float = 0.0
    reached: bool = False
    control: SwitchEffect | None = None
    not_tested: tuple[NotTested, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Every sampled token of one pair of legs, as columns `[token]`; plots are drawn from it."""

    sequence: tuple[int, ...]
    position: tuple[int, ...]
    token_id: tuple[int, ...]
    rollout: tuple[float, ...]
    train: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LogprobReport:
    """The whole result; the verdict is `parity` only if every leg was compared and is within the noise floor."""

    schema_version: int = LOGPROB_SCHEMA_VERSION
    model: str
    weights: dict[str, Any]
    sampling: Sampling | None
    verdict: Verdict
    why: str
    odd_leg: str | None
    legs: tuple[Leg, ...]
    pairs: tuple[PairReport, ...]
    findings: tuple[LogprobFinding, ...] = ()
    modes: tuple[EngineMode, ...] = ()
    attribution: Attribution | None = None
    presets: dict[str, tuple[PresetRow, ...]] = field(default_factory=dict)
    flips: Flips | None = None
    divergence: Divergence | None = None
    worst: tuple[TokenRow, ...] = ()
    notes: tuple[str, ...] = ()
    not_tested: tuple[NotTested, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    exit_code: int = 3
