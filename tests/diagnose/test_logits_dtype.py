"""The head in a narrow dtype, and logits with other columns than the vocabulary."""

from __future__ import annotations

import pytest
import torch
from held import Held
from held import probe as plain
from loose import SHORT, explained, loose

from parity_audit.compare.deltas import compare
from parity_audit.diagnose.returned import returned_findings

G = torch.Generator().manual_seed(9)
HIDDEN, UNEMBED = torch.randn(1, 48, 64, generator=G), torch.randn(131, 64, generator=G) / 8
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def side(logits, dtype=torch.float32):
    sites = {"ln_final.out": HIDDEN.to(dtype), "logits": logits}
    return loose(sites, weights={"unembed": UNEMBED}, probes=SHORT[:1], layer=None)


def found(logits):
    return {knob: item.candidate_value for knob, item in explained(side(logits), side(HIDDEN @ UNEMBED.T)).items()}


@pytest.mark.parametrize("name", LOW)
def test_the_place_of_a_narrow_dtype(name):
    def low(x):
        return x.to(LOW[name]).float()

    assert found(HIDDEN @ low(UNEMBED).T) == {"logits.dtype": f"{name} weights"}
    assert found(low(HIDDEN) @ UNEMBED.T) == {"logits.dtype": f"{name} inputs"}
    assert found(low(HIDDEN) @ low(UNEMBED).T) == {"logits.dtype": f"{name} inputs and weights"}
    assert found(low(low(HIDDEN) @ low(UNEMBED).T)) == {"logits.dtype": f"{name} throughout"}
    assert found(low(HIDDEN @ UNEMBED.T)) == {"logits.dtype": f"{name} logits"}


def test_float32_itself_and_a_factor_are_no_dtype():
    assert found((HIDDEN.double() @ UNEMBED.double().T).float()) == {}
    assert found(1.01 * (HIDDEN @ UNEMBED.T)) == {"logits.scale": pytest.approx(1.01, rel=1e-5)}


def test_logits_that_are_all_zero_have_no_dtype():
    """Every value leaves infinitely much of them, a narrow dtype as well."""
    assert found(torch.zeros(1, 48, 131)) == {}


def logits(extra=None, width=10):
    values = torch.randn(1, 6, width, generator=torch.Generator().manual_seed(1))
    return values if extra is None else torch.cat([values, torch.full((1, 6, 4), extra)], -1)


def vocabulary(ours, theirs):
    of = plain(length=6)
    truth, own = (Held(of, {"logits": value, "returned": value}) for value in (ours, theirs))
    return returned_findings(own, compare(own, truth, truth, dtype="float32"), "float32")[0]


def test_columns_beyond_the_vocabulary_count_where_they_get_probability():
    assert vocabulary(logits(), logits()) == []
    assert vocabulary(logits(), logits(-1e4)) == []
    (padded,) = vocabulary(logits(), logits(0.0))
    assert (padded.knob, padded.reference_value, padded.candidate_value) == ("logits.vocabulary", 10, 14)
    expected = float((4 / (4 + logits().double().exp().sum(-1))).max())
    assert padded.evidence["largest_probability_beyond"] == pytest.approx(expected, rel=1e-9)


def test_missing_columns_are_a_finding():
    (cut,) = vocabulary(logits(), logits(width=7))
    assert "the last 3 tokens" in cut.message
