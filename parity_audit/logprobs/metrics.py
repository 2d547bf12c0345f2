"""The canonical metrics of a pair of legs, each with its formula.

a is the rollout's (engine's) log-probability of a sampled token, b the trainer's, d = b - a, r = exp(d). Means are over
sampled tokens unless a formula says "seq". Each name has exactly one formula here; `profiles` lists the names that training
frameworks use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from parity_audit.logprobs.paired import Array, Paired

CHI2_CLIP = 20.0
"""The bound that verl puts on the log-ratio before it is exponentiated; the summed log-ratio of a sequence can reach it."""
RATIO_BAND = (0.5, 2.0)
"""Importance ratios outside this range count as low or high: verl's default threshold and its reciprocal."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: `formula` in the notation of the module docstring, and `ideal`, its value for equal legs."""

    name: str
    formula: str
    of: Callable[[Paired], float]
    ideal: float = 0.0


def _mean(name: str, formula: str, term: Callable[[Array, Array], Array], ideal: float = 0.0) -> Metric:
    return Metric(
        name=name, formula=f"mean({formula})", of=lambda p: float(term(p.rollout, p.train).mean()), ideal=ideal
    )


def _by_sequence(name: str, formula: str, of: Callable[[Array, Array], float], ideal: float = 0.0) -> Metric:
    """Return a metric over sequences; `of` is given the mean log-probability of each sequence under rollout and train."""
    return Metric(name=name, formula=formula, of=lambda p: of(p.means(p.rollout), p.means(p.train)), ideal=ideal)


def _k3(d: Array) -> Array:
    k3: Array = np.expm1(d) - d
    return k3


def _js_of_sampled(a: Array, b: Array) -> Array:
    """Return NeMo-RL's form: the mean of k3 from either side against the mixture of the sampled token's two probabilities."""
    mixture = np.logaddexp(a, b) - np.log(2.0)
    return 0.5 * _k3(b - mixture) + 0.5 * _k3(a - mixture)


def effective_share(weights: Array) -> float:
    """Return the effective sample size over the number of samples, 1 / mean((w / mean w)^2); 1 if all weights are equal."""
    return float(1.0 / np.mean(np.square(weights / weights.mean())))


def pearson(x: Array, y: Array) -> float:
    """Return the correlation coefficient; NaN if one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / scale if scale > 0.0 else float("nan")


def sequence_ratios(p: Paired) -> Array:
    """Return exp of the summed differences of each sequence, with the exponent clipped to +-20."""
    return np.exp(np.clip(p.sums(p.difference), -CHI2_CLIP, CHI2_CLIP))


_ALL = (
    _mean("abs_dlogp_mean", "|d|", lambda a, b: np.abs(b - a)),
    Metric(name="abs_dlogp_max", formula="max(|d|)", of=lambda p: float(np.abs(p.difference).max())),
    Metric(name="abs_dlogp_std", formula="std(|d|), n - 1", of=lambda p: _std(np.abs(p.difference))),
    Metric(name="rmse_dlogp", formula="sqrt(mean(d^2))", of=lambda p: float(np.sqrt(np.square(p.difference).mean()))),
    Metric(name="pearson_logp", formula="corr(a, b)", of=lambda p: pearson(p.rollout, p.train), ideal=1.0),
    _mean("k1_rollout_train", "a - b", lambda a, b: a - b),
    _mean("k2_rollout_train", "d^2 / 2", lambda a, b: np.square(b - a) / 2.0),
    _mean("k3_rollout_train", "exp(d) - d - 1", lambda a, b: _k3(b - a)),
    Metric(name="k3_rollout_train_max", formula="max(exp(d) - d - 1)", of=lambda p: float(_k3(p.difference).max())),
    Metric(name="k3_rollout_train_std", formula="std(exp(d) - d - 1), n - 1", of=lambda p: _std(_k3(p.difference))),
    _mean("k3_train_rollout", "exp(-d) + d - 1", lambda a, b: _k3(a - b)),
    _mean("js_sampled", "k3(b, m) / 2 + k3(a, m) / 2, m = log((e^a + e^b) / 2)", _js_of_sampled),
    _mean("token_mult_prob_error", "exp(|d|)", lambda a, b: np.exp(np.abs(b - a)), ideal=1.0),
    _mean("abs_dprob_mean", "|e^b - e^a|", lambda a, b: np.abs(np.exp(b) - np.exp(a))),
    Metric(name="abs_dprob_max", formula="max(|e^b - e^a|)", of=lambda p: float(_dprob(p).max())),
    Metric(name="abs_dprob_std", formula="std(|e^b - e^a|), n - 1", of=lambda p: _std(_dprob(p))),
    _mean("signed_dprob_mean", "e^a - e^b", lambda a, b: np.exp(a) - np.exp(b)),
    Metric(
        name="pearson_prob", formula="corr(e^a, e^b)", of=lambda p: pearson(np.exp(p.rollout), np.exp(p.train)), ideal=1.0
    ),
    _mean("reverse_kl_weighted", "e^a * (a - b)", lambda a, b: np.exp(a) * (a - b)),
    _mean("chi2_token", "exp(2 * clip(d, -20, 20)) - 1", lambda a, b: np.expm1(2.0 * np.clip(b - a, -CHI2_CLIP, CHI2_CLIP))),
    Metric(
        name="chi2_seq", formula="mean over seq of exp(2 * clip(sum d, -20, 20)) - 1",
        of=lambda p: float(np.expm1(2.0 * np.clip(p.sums(p.difference), -CHI2_CLIP, CHI2_CLIP)).mean()),
    ),
    Metric(
        name="ess_token", formula="1 / mean((r / mean r)^2)", of=lambda p: effective_share(np.exp(p.difference)), ideal=1.0
    ),
    Metric(
        name="ess_seq", formula="the same with exp(sum d) of each seq", of=lambda p: effective_share(sequence_ratios(p)),
        ideal=1.0,
    ),
    _mean("ratio_token_mean", "r", lambda a, b: np.exp(b - a), ideal=1.0),
    Metric(name="ratio_token_std", formula="std(r), n - 1", of=lambda p: _std(np.exp(p.difference))),
    Metric(name="ratio_token_min", formula="min(r)", of=lambda p: float(np.exp(p.difference.min())), ideal=1.0),
    Metric(name="ratio_token_max", formula="max(r)", of=lambda p: float(np.exp(p.difference.max())), ideal=1.0),
    _mean("ratio_token_high", f"r > {RATIO_BAND[1]:g}", lambda a, b: (np.exp(b - a) > RATIO_BAND[1]).astype(np.float64)),
    _mean("ratio_token_low", f"r < {RATIO_BAND[0]:g}", lambda a, b: (np.exp(b - a) < RATIO_BAND[0]).astype(np.float64)),
    Metric(
        name="ratio_seq_mean", formula="mean over seq of exp(sum d)", of=lambda p: float(sequence_ratios(p).mean()), ideal=1.0
    ),
    Metric(
        name="ratio_seq_min", formula="min over seq of exp(sum d)", of=lambda p: float(sequence_ratios(p).min()), ideal=1.0
    ),
    Metric(
        name="ratio_seq_max", formula="max over seq of exp(sum d)", of=lambda p: float(sequence_ratios(p).max()), ideal=1.0
    ),
    _by_sequence("ppl_rollout", "mean over seq of exp(-mean a)", lambda a, b: float(np.exp(-a).mean()), ideal=float("nan")),
    _by_sequence("ppl_train", "mean over seq of exp(-mean b)", lambda a, b: float(np.exp(-b).mean()), ideal=float("nan")),
    _by_sequence("log_ppl_rollout", "mean over seq of -mean a", lambda a, b: float(-a.mean()), ideal=float("nan")),
    _by_sequence("log_ppl_train", "mean over seq of -mean b", lambda a, b: float(-b.mean()), ideal=float("nan")),
    _by_sequence("ppl_ratio", "mean over seq of exp(mean a - mean b)", lambda a, b: float(np.exp(a - b).mean()), ideal=1.0),
    _by_sequence("log_ppl_diff", "mean over seq of (mean a - mean b)", lambda a, b: float((a - b).mean())),
    _by_sequence("log_ppl_abs_diff", "mean over seq of |mean a - mean b|", lambda a, b: float(np.abs(a - b).mean())),
    _by_sequence("log_ppl_diff_max", "max over seq of (mean a - mean b)", lambda a, b: float((a - b).max())),
    _by_sequence("log_ppl_diff_min", "min over seq of (mean a - mean b)", lambda a, b: float((a - b).min())),
)  # fmt: skip
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def all_metrics(pair: Paired) -> dict[str, float]:
    """Return every canonical metric of a pair of legs, by name."""
    return {name: metric.of(pair) for name, metric in METRICS.items()}


def _dprob(p: Paired) -> Array:
    return np.asarray(np.abs(np.exp(p.train) - np.exp(p.rollout)))


def _std(values: Array) -> float:
    """Return the standard deviation with n - 1; 0 for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
