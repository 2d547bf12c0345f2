"""Processed weights: a logit shift is allowed for, and nothing else is."""

import pytest
import torch
from held import Held, probe

from parity_audit.compare.deltas import compare
from parity_audit.compare.processing import Allowed, allowance
from parity_audit.compare.verdict import judge_comparison
from parity_audit.core.report import Verdict
from parity_audit.specs.schema import ResolvedKnob

PROBE = probe(length=6)
G = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(1, 6, 8, generator=G, dtype=torch.float64)
UNEMBED = torch.randn(40, 8, generator=G, dtype=torch.float64) + 0.3
STREAM = torch.randn(1, 6, 8, generator=G, dtype=torch.float64) + 1.0


def knobs(**values):
    return {
        name.replace("__", "."): ResolvedKnob(value=value, layers=None, off=None, kind="constant")
        for name, value in values.items()
    }


LAYER_NORM = knobs(norm__kind="layer", logits__softcap=None, attention__v_bias=True)


def side(*, centre_unembed=False, centre_stream=False, times=1.0, precise=False):
    unembed = UNEMBED - UNEMBED.mean(0) if centre_unembed else UNEMBED
    stream = STREAM - STREAM.mean(-1, keepdim=True) if centre_stream else STREAM
    dtype = torch.float64 if precise else torch.float32
    tensors = {
        "blocks.0.resid_post": stream * times,
        "ln_final.out": 3 * HIDDEN,
        "logits": HIDDEN @ (times * unembed.T),
    }
    return Held(PROBE, {name: value.to(dtype) for name, value in tensors.items()})


def verdict(candidate, processing, said=LAYER_NORM):
    allowed = allowance(processing, said)
    sides = [candidate, side(), side(precise=True)]
    return judge_comparison(compare(*[Allowed(item, allowed) for item in sides], dtype="float32"))[0]


ALL = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


def test_centred_weights_are_at_parity_with_the_ones_they_came_from():
    assert verdict(side(centre_unembed=True, centre_stream=True), ALL) in (Verdict.PARITY, Verdict.EXACT)


@pytest.mark.parametrize("times", [1 + 1e-4, 0.5])
def test_a_wrong_factor_is_no_shift(times):
    assert verdict(side(centre_unembed=True, centre_stream=True, times=times), ALL) is Verdict.MISMATCH


def test_only_what_was_processed_is_allowed_for():
    assert verdict(side(centre_unembed=True), ("fold_ln",)) is Verdict.MISMATCH
    assert verdict(side(centre_stream=True), ("fold_ln", "center_unembed")) is Verdict.MISMATCH


def test_a_soft_cap_sees_the_mean_and_rms_norms_do_too():
    capped = LAYER_NORM | knobs(logits__softcap=30.0)
    rms = LAYER_NORM | knobs(norm__kind="rms")

    assert verdict(side(centre_unembed=True), ALL, capped) is Verdict.MISMATCH
    assert verdict(side(centre_stream=True), ALL, rms) is Verdict.MISMATCH


def test_sites_that_mean_something_else_are_listed_and_not_compared():
    allowed = allowance(("refactor_factored_attn_matrices", "fold_value_biases", "fold_ln"), LAYER_NORM)

    assert Allowed(side(), allowed).sites("short") == {"blocks.0.resid_post", "logits"}
    left_out = {gap.what for gap in allowed.gaps()}
    assert {"ln_final.out", "q", "k", "v", "z", "weights, tensor by tensor"} <= left_out


def test_nothing_processed_nothing_allowed():
    assert allowance((), LAYER_NORM) is None
