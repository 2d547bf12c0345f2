"""A detection limit is a promise: an error above it is seen, one below it is not. Errors are made by loading configs."""

import math
import sys
from pathlib import Path

import pytest

import parity_audit
from parity_audit.capture.workspace import Workspace
from parity_audit.core.report import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ABOVE, BELOW = 2.0, 0.4
SETTINGS = {
    "norm.eps": lambda eps: f"rms_norm_eps={eps!r}",
    "logits.softcap": lambda cap: f"final_logit_softcapping={cap!r}",
}


def audit(out, *candidates):
    return parity_audit.audit(
        "gemma-2-2b-it", candidates=candidates, miniature="mini", out=out, probes=["short"], repair=False
    )


ONE_LAYER = f"python:{Path(__file__).parents[1] / 'ports' / 'one_layer.py'}:load"
IN_ONE_LAYER = {"norm.eps": "eps", "attention.scale": "scale"}


@pytest.fixture(scope="module")
def limits(tmp_path_factory):
    report = audit(tmp_path_factory.mktemp("clean"), "hf")
    assert report.candidates[0].verdict is Verdict.EXACT
    return {item.knob: item for item in report.candidates[0].detection}


def test_every_number_of_the_spec_has_a_limit_or_a_reason(limits, tmp_path):
    candidate = audit(tmp_path, "hf").candidates[0]
    without = {gap.what.removeprefix("detection limit of ") for gap in candidate.not_tested}

    assert limits.keys() >= {"attention.scale", "norm.eps", "rope.theta", "embed.scale", "logits.softcap"}
    assert "attention.window" in without, "a short probe does not reach the window"
    assert not limits.keys() & without
    assert all(0 < item.relative < 0.05 for item in limits.values())


@pytest.mark.parametrize("knob", SETTINGS)
def test_the_limit_parts_what_is_seen_from_what_is_not(knob, limits, tmp_path):
    known = limits[knob]
    errors = [factor * known.limit for factor in (ABOVE, BELOW)]
    above, below = audit(tmp_path, *[f"hf,{SETTINGS[knob](known.value + error)}" for error in errors]).candidates

    assert math.isfinite(known.limit)
    assert above.verdict is Verdict.MISMATCH, above.why
    assert below.verdict in (Verdict.PARITY, Verdict.EXACT), below.why


def test_an_error_in_the_least_sensitive_layer_is_seen_above_its_limit_and_not_below(limits, tmp_path):
    """2 and 0.3 times the limit, planted in that layer alone: the verdict itself says which is seen."""
    planted = [
        f"{ONE_LAYER},layer={limits[knob].one_layer.layer},{setting}={factor * limits[knob].one_layer.limit!r}"
        for knob, setting in IN_ONE_LAYER.items()
        for factor in (2.0, 0.3)
    ]
    verdicts = [candidate.verdict for candidate in audit(tmp_path, *planted).candidates]

    assert verdicts == [Verdict.MISMATCH, Verdict.PARITY] * 2


def test_one_layer_alone_is_never_more_sensitive_than_all_of_them(limits):
    """Errors of all layers add up, and rarely cancel."""
    alone = {knob: item.one_layer for knob, item in limits.items() if item.one_layer is not None}

    assert alone.keys() >= {"attention.scale", "norm.eps", "norm.offset", "rope.theta"}
    assert not alone.keys() & {"embed.scale", "logits.softcap", "logits.scale"}
    assert all(item.limit > limits[knob].limit for knob, item in alone.items())
    assert alone["attention.scale"].limit > 2 * limits["attention.scale"].limit


def test_a_large_model_is_moved_in_its_own_float32_and_says_the_same(limits, tmp_path, monkeypatch):
    """Only the residual stream is looked at there, so a limit may be larger but not smaller."""
    monkeypatch.setattr(sys.modules[Workspace.__module__], "SMALL_BYTES", 0)
    found = {item.knob: item for item in audit(tmp_path, "hf").candidates[0].detection}

    assert found.keys() >= {"attention.scale", "norm.offset", "rope.theta", "logits.scale"}
    assert all(item.limit > 0.8 * limits[knob].limit for knob, item in found.items())
    assert found["attention.scale"].limit == pytest.approx(limits["attention.scale"].limit, rel=0.2)
    assert found["logits.scale"].limit == pytest.approx(limits["logits.scale"].limit, rel=0.2)
    scale = limits["attention.scale"].one_layer.limit
    assert scale * 0.8 < found["attention.scale"].one_layer.limit < scale * 10
