"""The names that training frameworks give the metrics, and the levels from which on they raise an alarm.

A preset is a list of rows: the framework's own key, the canonical metric of `metrics.METRICS` that it computes, and its
alarm, with the source in which its level is published. If a framework publishes no level, there is no alarm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from parity_audit.core.errors import UsageError
from parity_audit.logprobs.metrics import METRICS


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """An alarm, raised by values outside [low, high]; `source` says who published these levels."""

    low: float = -math.inf
    high: float = math.inf
    source: str = ""

    def raised_by(self, value: float) -> bool:
        """Return whether the value is outside the range; NaN counts as outside."""
        return not self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a preset: the framework's key for a canonical metric."""

    key: str
    metric: str
    alarm: Alarm | None = None

    @property
    def formula(self) -> str:
        """Return the formula of the metric, in which a is the rollout's and b the trainer's log-probability."""
        return METRICS[self.metric].formula


def _row(key: str, metric: str, *, low: float = -math.inf, high: float = math.inf, source: str = "") -> Row:
    return Row(key=key, metric=metric, alarm=Alarm(low=low, high=high, source=source) if source else None)


VERL_FAQ = "verl docs/faq: above 0.01 is a precision issue of the engine"
VERL_CORRECTION = "verl docs/algo/rollout_corr"
NEMO = "NeMo-RL docs/adding-new-models"
PRIME = "prime-rl docs/development: a model is merged below it"

PROFILES: Mapping[str, tuple[Row, ...]] = {
    "verl": (
        _row("training/rollout_probs_diff_mean", "abs_dprob_mean", high=0.01, source=VERL_FAQ),
        _row("training/rollout_probs_diff_max", "abs_dprob_max"),
        _row("training/rollout_probs_diff_std", "abs_dprob_std"),
        _row("training/rollout_actor_probs_pearson_corr", "pearson_prob"),
        _row("rollout_corr/kl", "k1_rollout_train", low=-0.1, high=0.1, source=VERL_CORRECTION),
        _row("rollout_corr/k3_kl", "k3_rollout_train"),
        _row("rollout_corr/training_ppl", "ppl_train"),
        _row("rollout_corr/rollout_ppl", "ppl_rollout"),
        _row("rollout_corr/training_log_ppl", "log_ppl_train"),
        _row("rollout_corr/rollout_log_ppl", "log_ppl_rollout"),
        _row("rollout_corr/log_ppl_diff", "log_ppl_diff"),
        _row("rollout_corr/log_ppl_abs_diff", "log_ppl_abs_diff"),
        _row("rollout_corr/log_ppl_diff_max", "log_ppl_diff_max"),
        _row("rollout_corr/log_ppl_diff_min", "log_ppl_diff_min"),
        _row("rollout_corr/ppl_ratio", "ppl_ratio"),
        _row("rollout_corr/chi2_token", "chi2_token", high=1.0, source=VERL_CORRECTION),
        _row("rollout_corr/chi2_seq", "chi2_seq"),
        _row("rollout_corr/rollout_is_mean", "ratio_token_mean", low=0.5, high=2.0, source=VERL_CORRECTION),
        _row("rollout_corr/rollout_is_std", "ratio_token_std", high=1.0, source=VERL_CORRECTION),
        _row("rollout_corr/rollout_is_min", "ratio_token_min"),
        _row("rollout_corr/rollout_is_max", "ratio_token_max"),
        _row("rollout_corr/rollout_is_ratio_fraction_high", "ratio_token_high"),
        _row("rollout_corr/rollout_is_ratio_fraction_low", "ratio_token_low"),
        _row("rollout_corr/rollout_is_eff_sample_size", "ess_token", low=0.3, source=VERL_CORRECTION),
    ),
    "trl": (
        _row("sampling/sampling_logp_difference/mean", "abs_dlogp_mean"),
        _row("sampling/sampling_logp_difference/max", "abs_dlogp_max"),
        _row("sampling/importance_sampling_ratio/min", "ratio_seq_min"),
        _row("sampling/importance_sampling_ratio/mean", "ratio_seq_mean"),
        _row("sampling/importance_sampling_ratio/max", "ratio_seq_max"),
    ),
    "prime-rl": (
        _row("mismatch_kl/all/mean", "k3_rollout_train", high=0.015, source=PRIME),
        _row("mismatch_kl/all/std", "k3_rollout_train_std"),
        _row("mismatch_kl/all/max", "k3_rollout_train_max"),
    ),
    "nemo-rl": (
        _row("token_mult_prob_error", "token_mult_prob_error", high=1.05, source=NEMO),
        _row("gen_kl_error", "k3_rollout_train"),
        _row("policy_kl_error", "k3_train_rollout"),
        _row("js_divergence_error", "js_sampled", high=1e-3, source="NeMo-RL docs/guides/grpo"),
    ),
    "slime": (
        _row("train_rollout_logprob_abs_diff", "abs_dlogp_mean"),
        _row("mismatch_kl", "k1_rollout_train"),
        _row("mismatch_k3_kl", "k3_rollout_train"),
        _row("mismatch_training_ppl", "ppl_train"),
        _row("mismatch_rollout_ppl", "ppl_rollout"),
        _row("mismatch_log_ppl_diff", "log_ppl_diff"),
        _row("mismatch_log_ppl_abs_diff", "log_ppl_abs_diff"),
        _row("mismatch_ppl_ratio", "ppl_ratio"),
    ),
    "openrlhf": (_row("vllm_kl", "k1_rollout_train"),),
    "open-instruct": (
        _row("debug/vllm_vs_local_logprob_diff_mean", "abs_dlogp_mean"),
        _row("debug/vllm_vs_local_logprob_diff_max", "abs_dlogp_max"),
        _row("debug/vllm_vs_local_logprob_diff_std", "abs_dlogp_std"),
        _row("debug/vllm_local_reverse_kl", "reverse_kl_weighted"),
    ),
    "areal": (
        _row("behave_imp_weight", "ratio_token_mean", high=5.0, source="AReaL's default rejection level"),
        _row("behave_approx_kl", "k1_rollout_train"),
    ),
}


def profile(name: str) -> tuple[Row, ...]:
    """Return the rows of a preset.

    Raises:
        UsageError: there is no such preset.
    """
    if name not in PROFILES:
        raise UsageError(
            f"there is no preset `{name}`", code="unknown-profile", expected=", ".join(PROFILES), hint="--profile verl"
        )
    return PROFILES[name]
