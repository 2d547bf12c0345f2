"""What an engine's numbers mean, from simulated engines whose convention is known."""

import numpy as np
import pytest

from parity_audit.core.rollouts import Completion, Sampling
from parity_audit.logprobs.meaning import RAW, Meaning, columns, decide, meanings, policy
from parity_audit.logprobs.reporting import divergence

HOT = Sampling(temperature=0.7, top_p=0.9)


def _trainer(rng: np.random.Generator, tokens: int = 400) -> tuple[dict[float, np.ndarray], np.ndarray]:
    """Log-probabilities of drawn tokens at temperatures 1 and 0.7, and the log of what top-p 0.9 keeps at 0.7."""
    logits = 2.0 * rng.standard_normal((tokens, 50))
    at, kept = {}, None
    for temperature in (1.0, 0.7):
        log_p = logits / temperature
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        at[temperature] = log_p
    ranked = np.sort(np.exp(at[0.7]), axis=1)[:, ::-1]
    keep = ranked.cumsum(1) - ranked < 0.9
    kept = np.log((ranked * keep).sum(1))
    drawn = at[0.7].argmax(1)
    return {temperature: log_p[np.arange(tokens), drawn] for temperature, log_p in at.items()}, kept


@pytest.mark.parametrize(
    "truth", [RAW, Meaning(temperature=0.7), Meaning(temperature=0.7, truncated=True)], ids=lambda m: m.words
)
def test_each_convention_is_recognised_through_rounding(truth):
    rng = np.random.default_rng(0)
    at, kept = _trainer(rng)
    own = columns((1.0, 0.7), [at[1.0], at[0.7]], kept, meanings(HOT))
    decided = decide(own[truth] + 1e-3 * rng.standard_normal(len(kept)), own)

    assert decided.meaning == truth
    assert decided.clear
    assert decided.left[0][1] == pytest.approx(1e-3, rel=0.1)


def test_meanings_that_coincide_are_one():
    assert meanings(Sampling(temperature=1.0)) == (RAW,)
    assert policy(Sampling(temperature=0.0)) == RAW


def test_numbers_between_two_meanings_are_not_called_clear():
    values = {RAW: np.zeros(10), Meaning(temperature=0.7): np.ones(10)}
    assert not decide(np.full(10, 0.5), values).clear


def test_truncation_needs_the_kept_share():
    assert columns((1.0, 0.7), [np.zeros(2), np.zeros(2)], None, meanings(HOT)).keys() == {
        RAW,
        Meaning(temperature=0.7),
    }


def test_greedy_completions_are_held_against_the_judges_choice():
    """One leaves it at a tie (margin 0.01 for a largest |d| of 0.02), one where rounding cannot turn it."""
    completions = [Completion(prompt_ids=(1,), token_ids=ids) for ids in ((5, 6, 7), (5, 6, 7), (5, 6, 7))]
    theirs = (5, 6, 7, 5, 9, 7, 5, 6, 8)
    margin = np.array([1.0, 1.0, 1.0, 1.0, 0.01, 1.0, 1.0, 1.0, 0.5])
    found = divergence(completions, theirs, margin, moved=0.02)

    assert found.sequences == 3
    assert [(one.sequence, one.position, one.token_id, one.judge_token_id, one.tie) for one in found.first] == [
        (1, 1, 6, 9, True), (2, 2, 7, 8, False),
    ]  # fmt: skip
