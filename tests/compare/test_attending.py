"""Patterns and rotated queries and keys in bfloat16: other attention is told from the same attention written in another way."""

from dataclasses import replace

import pytest
import torch
from held import Held, probe

from parity_audit.compare.attending import QUERIES, attends_otherwise
from parity_audit.formulas.rotary import rotate

POS, HEADS, KV, WIDTH = 96, 4, 2, 32
DTYPE = "bfloat16"
DRAW = torch.Generator().manual_seed(0)
Q, K = (torch.randn(1, POS, heads, WIDTH, generator=DRAW, dtype=torch.float64) for heads in (HEADS, KV))
FREQUENCIES = 10000.0 ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)
MASKED = torch.ones(POS, POS).triu(1).bool()


def narrow(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def rotated(x: torch.Tensor, frequencies: torch.Tensor = FREQUENCIES, first: int = 100) -> torch.Tensor:
    """x at every fortieth position from `first` on, far enough from each other for frequencies to tell."""
    angles = (first + 40 * torch.arange(POS).double())[None, :, None] * frequencies
    return rotate(x, angles.cos(), angles.sin())


def held(q: torch.Tensor, k: torch.Tensor) -> Held:
    return Held(probe(length=POS), {"blocks.0.rot_q": q, "blocks.0.rot_k": k})


TRUE = held(rotated(Q), rotated(K))


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (rotated(Q), rotated(K)),
        (rotated(Q) / 4, rotated(K)),
        (rotated(Q, first=0), rotated(K, first=0)),
        (rotated(Q), rotated(K) - rotated(K).mean(1, keepdim=True)),
        (rotated(Q)[..., torch.randperm(WIDTH, generator=DRAW)], None),
    ],
    ids=[
        "rounded",
        "queries times the scale",
        "other positions",
        "keys less their mean",
        "components in another order",
    ],
)
def test_the_same_attention_written_otherwise(q, k):
    if k is None:  # the same order of components for both
        order = [int((rotated(Q)[0, 0, 0] - x).abs().argmin()) for x in q[0, 0, 0]]
        k = rotated(K)[..., order]

    assert not attends_otherwise(held(narrow(q), narrow(k)), TRUE, 0, DTYPE)


@pytest.mark.parametrize(
    ("q", "k"),
    [
        (rotated(Q, narrow(FREQUENCIES)), rotated(K, narrow(FREQUENCIES))),
        (rotated(Q, 5000.0 ** -(torch.arange(0, WIDTH, 2).double() / WIDTH)), rotated(K)),
        (rotated(Q), K),
    ],
    ids=["frequencies in bfloat16", "another base for queries", "keys that do not turn"],
)
def test_another_rotation(q, k):
    assert attends_otherwise(held(narrow(q), narrow(k)), TRUE, 0, DTYPE)


def test_tokens_before_the_last_are_not_read_and_padding_is_not_either():
    padded = replace(probe(length=POS), mask=((*[0] * 8, *[1] * (POS - 8)),))
    q, k = narrow(rotated(Q)), narrow(rotated(K))
    q[:, 8 : POS - QUERIES] = 0.0
    k[:, :8] = 100.0
    own = Held(padded, {"blocks.0.rot_q": q, "blocks.0.rot_k": k})

    assert not attends_otherwise(own, Held(padded, dict(TRUE.tensors)), 0, DTYPE)
    q[:, -QUERIES // 2] = 0.0
    assert attends_otherwise(own, Held(padded, dict(TRUE.tensors)), 0, DTYPE)


def attention(scores: torch.Tensor) -> Held:
    scores = scores.masked_fill(MASKED, -torch.inf)
    return Held(probe(length=POS), {"blocks.0.attn_scores": scores, "blocks.0.pattern": scores.softmax(-1)})


SCORES = 3 * torch.randn(1, HEADS, POS, POS, generator=DRAW, dtype=torch.float64)
SCORES[..., 0] += 8.0  # an attention sink


@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize(
    ("change", "other"),
    [
        (lambda scores: scores, False),
        (narrow, False),
        (lambda scores: scores + torch.randn(1, HEADS, POS, 1, generator=DRAW, dtype=torch.float64), False),
        (lambda scores: 1.25 * scores, True),
        (lambda scores: 30 * (scores / 30).tanh(), True),
        (lambda scores: scores.roll(1, -1), True),
    ],
    ids=["the same", "scores in bfloat16", "a constant for each query", "another scale", "a cap", "keys moved"],
)
def test_patterns_behind_an_attention_sink(change, other, offset):
    """The size of the scores is no fault: bfloat16 rounds large ones by more."""
    true = attention(SCORES + offset)
    own = attention(change(SCORES + offset))
    own.tensors["blocks.0.pattern"] = narrow(own.tensors["blocks.0.pattern"])

    assert attends_otherwise(own, true, 0, DTYPE) is other


@pytest.mark.parametrize(("weight", "other"), [(3e-4, True), (2e-5, False)])
def test_weights_that_bfloat16_does_not_show_count_as_equal(weight: float, other: bool):
    def weighed(last: float) -> Held:
        pattern = torch.tensor([[[[1.0, 0.0], [1.0 - last, last]]]], dtype=torch.float64)
        return Held(probe(length=2), {"blocks.0.attn_scores": pattern.log(), "blocks.0.pattern": pattern})

    assert attends_otherwise(weighed(3 * weight), weighed(weight), 0, DTYPE) is other


def test_nothing_shown_is_nothing_said():
    assert not attends_otherwise(Held(probe(length=POS), {}), TRUE, 0, DTYPE)
