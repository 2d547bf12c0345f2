"""Experts from outside: inputs, router weights and their sum, made by transformers' own experts and by hand."""

from __future__ import annotations

import pytest
import torch
from loose import SHORT, departing, loose, told
from torch.nn import functional
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

EXPERTS, K, D, MLP = 12, 2, 64, 48
G = torch.Generator().manual_seed(3)
X = torch.randn(1, 48, D, generator=G)
GATE, UP = (torch.randn(EXPERTS, MLP, D, generator=G) / 8 for _ in range(2))
DOWN = torch.randn(EXPERTS, D, MLP, generator=G) / 7
CHOSEN = torch.randn(1, 48, EXPERTS, generator=G).topk(K, -1)
WEIGHTS = torch.zeros(1, 48, EXPERTS).scatter(-1, CHOSEN.indices, CHOSEN.values.softmax(-1))
TENSORS = {
    f"moe.{part}.{e}": of[e] for part, of in (("gate", GATE), ("up", UP), ("down", DOWN)) for e in range(EXPERTS)
} | {"moe.router": torch.ones(EXPERTS, D)}


def summed(hidden=lambda g, u: functional.silu(g) * u, weighted="outputs"):
    """The sum over experts, every one for every token."""
    w = WEIGHTS[..., None]  # [batch token expert 1]
    x = X[:, :, None] * w if weighted == "inputs" else X[:, :, None].expand(-1, -1, EXPERTS, -1)
    g, u = (torch.einsum("bted,emd->btem", x, matrix) for matrix in (GATE, UP))
    out = torch.einsum("btem,edm->bted", hidden(g, u), DOWN)
    return ({"outputs": w, "inputs": (w > 0).float(), "nothing": (w > 0).float()}[weighted] * out).sum(2)


def side(out, tensors=TENSORS, activation="silu"):
    sites = {"ln2.out": X, "mlp.router_weights": WEIGHTS, "mlp_out": out}
    return loose(sites, weights=tensors, probes=SHORT[:1], mlp__activation=activation)


def found(out):
    return {knob: item.candidate_value for knob, item in told(side(out), side(summed())).items()}


def test_the_same_experts_are_no_finding():
    assert found(summed()) == {}


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (summed(lambda g, u: functional.gelu(g) * u), {"mlp.activation": "gelu"}),
        (summed(lambda g, u: functional.gelu(g, approximate="tanh") * u), {"mlp.activation": "gelu_pytorch_tanh"}),
        (summed(lambda g, u: g * torch.sigmoid(1.3 * g) * u), {"mlp.activation": "swish(1.3)"}),
        (summed(lambda g, u: functional.silu(u) * g), {"mlp.gate_up": "up activated"}),
        (summed(weighted="inputs"), {"moe.weighted": "inputs"}),
        (summed(weighted="nothing"), {"moe.weighted": "nothing"}),
    ],
)
def test_what_the_experts_do_is_read_off_their_sum(out, says):
    assert found(out) == says


@pytest.mark.parametrize("tokens", [[5], [1, 2, 30, 31, 47]])
@pytest.mark.parametrize("whole", [False, True])
def test_tokens_that_lack_a_share(tokens, whole):
    """One expert takes no more tokens: their sums lack its share, or everything."""
    out = summed().clone()
    for token in tokens:
        chosen = CHOSEN.indices[0, token, :1]
        x, w = X[0, token], WEIGHTS[0, token, chosen]
        share = w[:, None] * torch.einsum(
            "em,edm->ed", functional.silu(GATE[chosen] @ x) * (UP[chosen] @ x), DOWN[chosen]
        )
        out[0, token] = 0.0 if whole else out[0, token] - share[0]

    assert found(out) == {"moe.dropped": "one expert's share, or all, of some tokens"}


def test_a_sum_that_no_activation_makes_is_not_named():
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(7))
    assert found(summed() + 0.3 * noise) == {}


@pytest.mark.parametrize(("alpha", "name"), [(1.702, "swiglu_clamped"), (1.0, "swiglu_clamped(1)")])
def test_the_experts_of_gpt_oss(alpha, name):
    config = GptOssConfig(hidden_size=D, intermediate_size=MLP, num_local_experts=EXPERTS, num_experts_per_tok=K)
    module = GptOssExperts(config)
    module.alpha = alpha
    bias = torch.randn(EXPERTS, D, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        # The checkpoint has gate and linear input alternating, and its matrices [in out].
        module.gate_up_proj.copy_(40 * torch.stack([GATE, UP], 2).flatten(1, 2).transpose(1, 2))
        module.gate_up_proj_bias.zero_()
        module.down_proj.copy_(DOWN.transpose(1, 2))
        module.down_proj_bias.copy_(bias)
        out = module(X[0], CHOSEN.indices[0], CHOSEN.values[0].softmax(-1))
    scaled = {name: value if ".down" in name else 40 * value for name, value in TENSORS.items()}
    tensors = {**scaled, **{f"moe.down.bias.{e}": bias[e] for e in range(EXPERTS)}}

    assert {knob: fit.value for knob, fit in departing(side(out.view(1, 48, D), tensors)).items()} == {
        "mlp.activation": name
    }
