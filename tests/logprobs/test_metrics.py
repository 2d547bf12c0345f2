"""Metrics against the worked example of three tokens, closed forms and simulations with a known answer."""

import math

import numpy as np
import pytest

from parity_audit.core.errors import NotJudged, UsageError
from parity_audit.logprobs.intervals import intervals
from parity_audit.logprobs.metrics import METRICS, all_metrics
from parity_audit.logprobs.paired import paired
from parity_audit.logprobs.profiles import PROFILES, profile
from parity_audit.logprobs.tails import by_position, by_probability, extreme_shares, histogram, quantiles, worst_tokens
from parity_audit.logprobs.training import training_effect

EXAMPLE = paired([[-1.0, -2.0, -3.0]], [[-1.1, -1.9, -3.2]])
EXPECTED = {
    "abs_dlogp_mean": 0.1333333333,
    "abs_dlogp_max": 0.2,
    "rmse_dlogp": 0.1414213562,
    "k1_rollout_train": 0.0666666667,
    "k2_rollout_train": 0.01,
    "k3_rollout_train": 0.0095796964,
    "k3_train_rollout": 0.0104703648,
    "js_sampled": 0.0024968826,
    "token_mult_prob_error": 1.1439148648,
    "abs_dprob_mean": 0.0194221859,
    "abs_dprob_max": 0.0350083575,
    "abs_dprob_std": 0.0137469488,
    "signed_dprob_mean": 0.0099332953,
    "ppl_ratio": 1.0689391057,
    "log_ppl_diff": 0.0666666667,
    "chi2_token": -0.0965154809,
    "chi2_seq": -0.3296799540,
    "ess_token": 0.9840622200,
    "ratio_token_min": 0.8187307531,
    "ratio_token_mean": 0.9429130297,
    "ratio_token_max": 1.1051709181,
    "ratio_seq_mean": 0.8187307531,
    "reverse_kl_weighted": 0.0110706098,
}


@pytest.mark.parametrize(("name", "value"), EXPECTED.items())
def test_the_worked_example(name, value):
    assert METRICS[name].of(EXAMPLE) == pytest.approx(value, abs=6e-11)


@pytest.mark.parametrize("name", METRICS)
def test_equal_legs_are_at_the_ideal(name):
    same = paired([[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]])
    value, ideal = METRICS[name].of(same), METRICS[name].ideal
    assert math.isnan(ideal) or value == pytest.approx(ideal, abs=1e-12)


@pytest.mark.parametrize(
    ("framework", "key", "value"),
    [
        ("verl", "rollout_corr/kl", 0.0666666667),
        ("verl", "training/rollout_probs_diff_mean", 0.0194221859),
        ("trl", "sampling/importance_sampling_ratio/mean", 0.8187307531),
        ("prime-rl", "mismatch_kl/all/mean", 0.0095796964),
        ("nemo-rl", "policy_kl_error", 0.0104703648),
        ("slime", "mismatch_kl", 0.0666666667),
        ("openrlhf", "vllm_kl", 0.0666666667),
        ("open-instruct", "debug/vllm_local_reverse_kl", 0.0110706098),
        ("areal", "behave_imp_weight", 0.9429130297),
    ],
)
def test_a_framework_finds_its_own_number_under_its_own_key(framework, key, value):
    row = next(row for row in profile(framework) if row.key == key)
    assert METRICS[row.metric].of(EXAMPLE) == pytest.approx(value, abs=6e-11)


def test_alarms_are_raised_at_the_published_levels():
    alarms = {row.key: row.alarm for rows in PROFILES.values() for row in rows if row.alarm}
    assert alarms["token_mult_prob_error"].raised_by(1.0501)
    assert not alarms["token_mult_prob_error"].raised_by(1.0499)
    assert alarms["mismatch_kl/all/mean"].raised_by(0.0151)
    assert alarms["rollout_corr/kl"].raised_by(-0.11)
    assert alarms["rollout_corr/rollout_is_eff_sample_size"].raised_by(math.nan)


def test_an_unknown_preset_is_refused():
    with pytest.raises(UsageError, match="no preset"):
        profile("ver1")


def test_every_preset_names_metrics_that_exist():
    assert {row.metric for rows in PROFILES.values() for row in rows} <= METRICS.keys()
    assert all_metrics(EXAMPLE).keys() == METRICS.keys()


@pytest.mark.parametrize(
    ("rollout", "train", "code"),
    [
        ([], [], "no-tokens"),
        ([[]], [[]], "no-tokens"),
        ([[-1.0]], [], "different-rollouts"),
        ([[-1.0]], [[-1.0, -2.0]], "different-rollouts"),
        ([[-1.0, math.nan]], [[-1.0, -2.0]], "bad-logprob"),
        ([[-1.0, -2.0]], [[-1.0, -math.inf]], "bad-logprob"),
        ([[-1.0, 0.5]], [[-1.0, -2.0]], "bad-logprob"),
    ],
)
def test_what_cannot_be_compared_is_an_error(rollout, train, code):
    with pytest.raises(NotJudged) as error:
        paired(rollout, train)
    assert error.value.code == code


def _noisy(sigma: float, sequences: int = 200, length: int = 50, seed: int = 0):
    rng = np.random.default_rng(seed)
    train = -rng.exponential(1.5, (sequences, length)) - 3.0 * sigma
    return paired((train - sigma * rng.standard_normal((sequences, length))).clip(max=0).tolist(), train.tolist())


def test_intervals_hold_the_true_value_of_gaussian_differences():
    """d ~ N(0, s): mean |d| = s sqrt(2 / pi), rmse = s, k3 = exp(s^2 / 2) - 1; 19 of 20 intervals hold it."""
    sigma = 0.1
    truth = {
        "abs_dlogp_mean": sigma * math.sqrt(2 / math.pi),
        "rmse_dlogp": sigma,
        "k3_rollout_train": math.expm1(sigma**2 / 2),
    }
    held = dict.fromkeys(truth, 0)
    for seed in range(40):
        found = intervals(_noisy(sigma, seed=seed))
        for name, value in truth.items():
            held[name] += found[name][0] <= value <= found[name][1]

    assert all(33 <= count <= 40 for count in held.values()), held


def test_intervals_widen_when_sequences_differ_and_not_their_tokens():
    """One constant difference per sequence: the interval is that of 20 numbers, however many tokens each has."""
    rng = np.random.default_rng(0)
    offsets = rng.normal(0.2, 0.05, 20)
    pair = paired([[-1.0] * 400] * 20, [[-1.0 - offset] * 400 for offset in offsets])
    low, high = intervals(pair)["k1_rollout_train"]

    assert high - low == pytest.approx(2 * 1.96 * offsets.std() / math.sqrt(20), rel=0.15)


def test_too_few_sequences_have_no_interval():
    assert intervals(paired([[-1.0, -2.0]] * 3, [[-1.0, -2.1]] * 3)) == {}


def test_tails_of_a_known_distribution():
    """d = 0.001 k for k = 1..1000."""
    rollout = [[-2.0] * 1000]
    pair = paired(rollout, [[-2.0 - 0.001 * k for k in range(1, 1001)]])

    assert quantiles(pair)["p99"] == pytest.approx(0.99, abs=2e-3)
    assert extreme_shares(pair)[1.5] == pytest.approx(1 - math.log(1.5), abs=2e-3)
    assert list(worst_tokens(pair, 2)) == [999, 998]
    assert [b.tokens for b in by_probability(pair)] == [100] * 10
    assert by_probability(pair)[0].mean > by_probability(pair)[-1].mean
    assert sum(b.tokens for b in by_position(pair)) == 1000


def test_clipping_and_effective_sample_size_of_a_batch():
    """Half the sequences have the ratio 2, half 1: ESS = (1.5^2) / ((4 + 1) / 2) = 0.9; half the tokens are clipped."""
    pair = paired([[-3.0]] * 128, [[-3.0 + (math.log(2) if i % 2 else 0.0)] for i in range(128)])
    effect = training_effect(pair)

    assert effect.batch == 64
    assert effect.ess_per_batch == pytest.approx(0.9, abs=1e-12)
    assert effect.clipped == 0.5
    assert effect.truncated <= 0.5


def test_the_histogram_counts_every_token_once():
    """|d| of 1, 10, 100, 1000 and 1000 millionths in 24 bins of equal ratio, eight to a decade; two tokens are equal."""
    sizes = [0.0, 0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-3]
    found = histogram(paired([[-1.0] * 7], [[-1.0 - size for size in sizes]]))

    assert (found.zeros, sum(found.counts), len(found.counts)) == (2, 5, 24)
    assert (found.low, found.high) == pytest.approx((1e-6, 1e-3), rel=1e-6)
    assert [index for index, count in enumerate(found.counts) if count] == pytest.approx([0, 8, 16, 23], abs=1)
    assert histogram(paired([[-1.0, -2.0]], [[-1.0, -2.0]])).counts == ()
