"""References whose logits say nothing: agreement with them is inconclusive, by the verdict's own rule."""

import pytest
import torch
from held import Held

from parity_audit.compare import signal
from parity_audit.compare.deltas import compare
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.limits import PARITY_RATIO
from parity_audit.core.report import Verdict
from parity_audit.core.types import Probe

VOCABULARY, LENGTH = 50, 12
FLOOR = 1e-4
DRAW = torch.Generator().manual_seed(0)


def probe(*rows, pads=0, sites="all"):
    mask = tuple((0,) * pads + (1,) * (len(row) - pads) for row in rows)
    return Probe(name="short", purpose="", token_ids=tuple(map(tuple, rows)), mask=mask, sites=sites)


PLAIN = probe(range(LENGTH))
TWICE = probe([*range(6), *range(6)])


def noise(*shape):
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def verdict(exact, own=PLAIN, rounding=FLOOR):
    """Of a clean candidate: both sides round the judge's logits `exact` [1 position d_vocab] on their own."""
    reference, candidate = (
        Held(own, {"logits": (exact + rounding * noise(*exact.shape)).float()}) for _ in range(2)
    )  # fmt: skip
    return judge_comparison(compare(candidate, reference, Held(own, {"logits": exact}), dtype="float32"))


def test_logits_that_depend_on_everything_are_judged():
    assert verdict(noise(1, LENGTH, VOCABULARY))[0] is Verdict.PARITY
    assert verdict(noise(1, LENGTH, VOCABULARY), TWICE)[0] is Verdict.PARITY


@pytest.mark.parametrize("value", [0.0, 1.0, 3e8])
def test_constant_logits_are_inconclusive_though_bit_identical(value):
    exact = torch.full((1, LENGTH, VOCABULARY), value, dtype=torch.float64)

    assert verdict(exact, rounding=0.0) == (Verdict.INCONCLUSIVE, signal.FLAT)


@pytest.mark.parametrize(
    ("amplitude", "expected"), [(0.0, Verdict.INCONCLUSIVE), (0.3, Verdict.INCONCLUSIVE), (3.0, Verdict.PARITY)]
)
def test_a_program_that_ignores_its_input_would_pass_up_to_the_limit_of_the_logits(amplitude, expected):
    """The part of the logits that depends on the position, as a multiple of what the verdict calls rounding."""
    exact = 1e3 * noise(1, 1, VOCABULARY) + amplitude * PARITY_RATIO * FLOOR * noise(1, LENGTH, VOCABULARY)
    found, why = verdict(exact)

    assert found is expected
    assert (why == signal.IGNORES_INPUT) is (expected is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("amplitude", "expected"), [(0.0, Verdict.INCONCLUSIVE), (0.3, Verdict.INCONCLUSIVE), (3.0, Verdict.PARITY)]
)
def test_one_logit_for_the_whole_vocabulary_up_to_the_limit(amplitude, expected):
    exact = 1e3 * noise(1, LENGTH, 1) + amplitude * PARITY_RATIO * FLOOR * noise(1, LENGTH, VOCABULARY)
    found, why = verdict(exact)

    assert found is expected
    assert (why == signal.FLAT) is (expected is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("amplitude", "expected"), [(0.0, Verdict.INCONCLUSIVE), (0.3, Verdict.INCONCLUSIVE), (3.0, Verdict.PARITY)]
)
def test_equal_tokens_with_equal_logits_mean_that_nothing_attends(amplitude, expected):
    by_token = noise(1, 6, VOCABULARY)
    exact = torch.cat([by_token, by_token + amplitude * PARITY_RATIO * FLOOR * noise(1, 6, VOCABULARY)], dim=1)
    found, why = verdict(exact, TWICE)

    assert found is expected
    assert (why == signal.IGNORES_CONTEXT) is (expected is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(("factor", "expected"), [(1e4, Verdict.INCONCLUSIVE), (1.0, Verdict.PARITY)])
def test_logits_at_their_cap_are_saturated(factor, expected):
    exact = 30 * torch.tanh(factor * noise(1, LENGTH, VOCABULARY))
    found, why = verdict(exact, rounding=0.0 if factor > 1 else FLOOR)

    assert found is expected
    assert ("saturated" in why) is (expected is Verdict.INCONCLUSIVE)


@pytest.mark.parametrize(("share", "expected"), [(0.3, Verdict.PARITY), (0.8, Verdict.INCONCLUSIVE)])
def test_how_many_may_be_at_the_cap(share, expected):
    exact = noise(1, LENGTH, VOCABULARY).clamp(-5, 5)
    exact[..., : round(share * VOCABULARY)] = 30 * noise(1, LENGTH, round(share * VOCABULARY)).sign()
    own = Held(PLAIN, {"logits": exact.float()})

    assert bool(signal.no_signal(own, Held(PLAIN, {"logits": exact}), dtype="float32")) is (
        expected is Verdict.INCONCLUSIVE
    )


def test_one_position_says_nothing_about_the_input():
    assert verdict(noise(1, 1, VOCABULARY), probe([7])) == (Verdict.INCONCLUSIVE, signal.IGNORES_INPUT)


def test_a_wrong_candidate_stays_a_mismatch():
    exact = torch.zeros(1, LENGTH, VOCABULARY, dtype=torch.float64)
    truth, wrong = Held(PLAIN, {"logits": exact}), Held(PLAIN, {"logits": exact + 1.0})

    assert judge_comparison(compare(wrong, truth, truth, dtype="float32"))[0] is Verdict.MISMATCH


def test_padding_is_no_signal():
    """Two positions with the same logits, and padding that holds something else."""
    exact = torch.cat([noise(1, 2, VOCABULARY), noise(1, 1, VOCABULARY).expand(1, 2, VOCABULARY)], dim=1)

    assert verdict(exact, probe([3, 3, 4, 5], pads=2))[1] == signal.IGNORES_INPUT


def test_pairs_are_the_same_token_after_different_ones():
    pairs = signal.same_token_pairs([probe([1, 2, 3, 2], [9, 1, 2, 8], pads=0), probe([1, 2], sites="all")])
    places = [(one[1:], other[1:]) for one, other in pairs]

    assert places == [((0, 1), (0, 3)), ((0, 0), (1, 1)), ((0, 1), (1, 2))]


def test_the_same_is_said_without_a_judge():
    held = Held(PLAIN, {"logits": torch.ones(1, LENGTH, VOCABULARY)})

    assert judge_comparison(compare(held, held, None, dtype="float32")) == (Verdict.INCONCLUSIVE, signal.FLAT)
