"""Activations against torch's and transformers' own: plain and gated, clamped, with constants of their own."""

from __future__ import annotations

import math

import pytest
import torch
from loose import differ, loose, read
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

G = torch.Generator().manual_seed(0)
PRE = 3.5 * torch.randn(1, 48, 64, generator=G, dtype=torch.float64)
LINEAR = 3.5 * torch.randn(1, 48, 64, generator=G, dtype=torch.float64)
NAMES = ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "relu2", "leaky_relu", "mish", "tanh"]


def side(post: Tensor, *, gated: bool, act: str = "gelu", **more: Tensor):
    sites = {"mlp.pre": PRE, "mlp.post": post} | ({"mlp.pre_linear": LINEAR} if gated else {}) | more
    return loose({site: x.float() for site, x in sites.items()}, mlp__activation=act)


def clamped(pre: Tensor, linear: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """As written in the module of gpt-oss."""
    gate, up = pre.clamp(min=None, max=limit), linear.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_functions_of_transformers(name: str, gated: bool):
    post = ACT2FN[name](PRE.float()) * (LINEAR.float() if gated else 1.0)

    knobs = read(side(post, gated=gated, act=name), "activation")

    assert knobs["mlp.activation"].value == name
    assert ("mlp.gate_up" in knobs) == gated
    assert differ(side(post, gated=gated), side(ACT2FN[name](PRE) * (LINEAR if gated else 1.0), gated=gated)) == {}


def test_the_clamped_one_of_gpt_oss():
    post, plain = clamped(PRE.float(), LINEAR.float()), clamped(PRE, LINEAR, limit=math.inf)

    assert read(side(post, gated=True), "activation")["mlp.activation"].value == "swiglu_clamped"
    found = differ(side(plain, gated=True, act="swiglu_clamped"), side(post, gated=True, act="swiglu_clamped"))
    assert found["mlp.activation"].candidate_value == "swiglu_clamped(1.702, limit not reached)"
    assert found["mlp.activation"].departs_from_spec == "candidate"


@pytest.mark.parametrize(
    ("post", "said"),
    [
        (PRE * torch.sigmoid(1.5 * PRE) * LINEAR, "swish(1.5)"),
        (functional.leaky_relu(PRE, 0.2) * LINEAR, "leaky_relu(0.2)"),
        (0.5 * functional.silu(PRE) * LINEAR, "0.5 * silu"),
        (clamped(PRE, LINEAR, alpha=1.0), "swiglu_clamped(1, 7)"),
        (clamped(PRE, LINEAR, limit=5.0), "swiglu_clamped(1.702, 5)"),
        (LINEAR, "none"),
    ],
)
def test_constants_of_their_own(post: Tensor, said: str):
    found = differ(side(post, gated=True, act="silu"), side(functional.silu(PRE) * LINEAR, gated=True, act="silu"))

    assert found["mlp.activation"].candidate_value == said
    assert found.keys() <= {"mlp.activation", "mlp.gate_up"}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "silu", "relu2"])
def test_clean_in_bfloat16(gated: bool, act: str):
    low, gate = PRE.bfloat16(), LINEAR.bfloat16()
    post = ACT2FN[act](low) * (gate if gated else 1.0)
    exact = ACT2FN[act](low.double()) * (gate.double() if gated else 1.0)
    inputs = {"mlp.pre": low} | ({"mlp.pre_linear": gate} if gated else {})

    assert differ(side(post, gated=gated, act=act, **inputs), side(exact, gated=gated, act=act, **inputs)) == {}


def test_small_inputs_leave_a_tie():
    post = functional.gelu(PRE.float() * 1e-4)

    fit = read(side(post, gated=False, **{"mlp.pre": PRE * 1e-4}), "activation")["mlp.activation"]

    assert {fit.value, *fit.evidence["tied_with"]} >= {"gelu", "gelu_pytorch_tanh"}


@pytest.mark.parametrize(("times", "tied"), [(2.0, True), (5.0, False)])
def test_a_function_that_leaves_clearly_more_than_the_best_is_not_tied_with_it(times, tied):
    """The distance of the two kinds of GELU, over a noise that makes the second leave so many times what the first leaves."""
    apart = float((functional.gelu(PRE) - functional.gelu(PRE, approximate="tanh")).square().mean().sqrt())
    size = apart / math.sqrt(times**2 - 1)
    post = functional.gelu(PRE) + size * torch.randn(
        PRE.shape, generator=torch.Generator().manual_seed(1), dtype=PRE.dtype
    )
    (fit,) = (one for one in (read(side(post, gated=False), "activation").values()) if one.knob == "mlp.activation")

    assert fit.value == "gelu"
    assert ("gelu_pytorch_tanh" in fit.evidence.get("tied_with", [])) is tied
