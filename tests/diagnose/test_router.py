"""Routers: laws written out by hand, and transformers' own router, read off logits and weights alone."""

from __future__ import annotations

import pytest
import torch
from loose import SHORT, differ, explained, loose
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

EXPERTS, K, WIDTH = 12, 3, 64
X = torch.randn(1, 48, WIDTH, generator=torch.Generator().manual_seed(1))
W = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(2)) / 8
LOGITS = X @ W.T


def side(weights: torch.Tensor, logits: torch.Tensor = LOGITS):
    sites = {"ln2.out": X, "mlp.router_logits": logits, "mlp.router_weights": weights}
    return loose(
        sites, weights={"moe.router": W}, probes=SHORT[:1], moe__top_k=K, moe__norm_topk=True, moe__router="softmax"
    )  # fmt: skip


def routed(score=lambda x: x.softmax(-1), *, renormalise=True, k=K, by=None, times=1.0, logits=LOGITS):
    chosen = (logits if by is None else by).topk(k, -1).indices
    kept = score(logits).gather(-1, chosen)
    kept = kept / kept.sum(-1, keepdim=True) if renormalise else kept
    return torch.zeros_like(logits).scatter(-1, chosen, times * kept)


CLEAN = routed()


def found(weights, logits=LOGITS):
    return {knob: finding.candidate_value for knob, finding in explained(side(weights, logits), side(CLEAN)).items()}


def test_nothing_is_found_between_equals():
    assert found(CLEAN.clone()) == {}


@pytest.mark.parametrize(
    ("weights", "knob", "value"),
    [
        (routed(k=2), "moe.top_k", 2),
        (routed(k=5), "moe.top_k", 5),
        (routed(renormalise=False), "moe.norm_topk", False),
        (routed(torch.sigmoid), "moe.router", "sigmoid"),
        (routed(torch.ones_like), "moe.router", "equal weights"),
        (routed(times=2.5), "moe.scale", pytest.approx(2.5, rel=1e-5)),
        (routed(lambda x: (x / 1.3).softmax(-1)), "moe.temperature", pytest.approx(1.3, rel=1e-4)),
        (routed(by=-LOGITS), "moe.choice", "smallest logits"),
        (routed(by=LOGITS.roll(2, -1)), "moe.choice", "the experts 2 after those of the largest logits"),
        (routed(lambda x: x.bfloat16().float().softmax(-1)), "moe.router_dtype", "bfloat16 logits"),
        (routed().half().float(), "moe.router_dtype", "float16 weights"),
    ],
)
def test_one_cause_is_one_finding(weights, knob, value):
    assert found(weights) == {knob: value}


def test_sigmoid_without_renormalisation_is_both():
    assert found(routed(torch.sigmoid, renormalise=False)) == {"moe.router": "sigmoid", "moe.norm_topk": False}


def test_a_router_that_is_no_law_is_not_named():
    noise = torch.rand(LOGITS.shape, generator=torch.Generator().manual_seed(4))
    assert "moe.router" not in found(CLEAN * (0.5 + noise))


def test_other_weights_of_the_router_are_seen():
    logits = X @ W.bfloat16().float().T
    seen = differ(side(routed(logits=logits), logits), side(CLEAN))
    assert {knob: finding.candidate_value for knob, finding in seen.items()} == {
        "weights.moe.router": "the checkpoint's rounded to bfloat16"
    }


@pytest.mark.parametrize(
    ("module", "norm_topk"),
    [
        (MixtralTopKRouter(MixtralConfig(hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=K)), True),
        *(
            (Qwen3MoeTopKRouter(Qwen3MoeConfig(
                hidden_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=K, norm_topk_prob=renormalised
            )), renormalised)
            for renormalised in (True, False)
        ),
    ],
)  # fmt: skip
def test_the_routers_of_transformers(module, norm_topk):
    with torch.no_grad():
        module.weight.copy_(W)
        _, weights, chosen = module(X)
    dense = torch.zeros_like(LOGITS).scatter(-1, chosen.view(1, 48, K), weights.view(1, 48, K))

    assert found(dense) == ({} if norm_topk else {"moe.norm_topk": False})
