"""Activations against torch's and transformers' own: plain and gated, clamped, with constants of their own."""

from __future__ import annotations

import math

import pytest
import torch
from loose import departing, loose, told
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from parity_audit.formulas.activations import canonical

G = torch.Generator().manual_seed(0)
PRE = 3.5 * torch.randn(1, 48, 64, generator=G, dtype=torch.float64)
LINEAR = 3.5 * torch.randn(1, 48, 64, generator=G, dtype=torch.float64)
NAMES = ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu", "relu2", "leaky_relu", "mish", "tanh"]


def side(post: Tensor, *, gated: bool, act: str = "gelu", **more: Tensor):
    sites = {"mlp.pre": PRE, "mlp.post": post} | ({"mlp.pre_linear": LINEAR} if gated else {}) | more
    weights = {"mlp.gate": torch.ones(64, 64), "mlp.up": torch.ones(64, 64)} if gated else {}
    return loose({site: x.float() for site, x in sites.items()}, weights=weights, mlp__activation=act)


def clamped(pre: Tensor, linear: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """As written in the module of gpt-oss."""
    gate, up = pre.clamp(min=None, max=limit), linear.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_functions_of_transformers(name: str, gated: bool):
    post = ACT2FN[name](PRE.float()) * (LINEAR.float() if gated else 1.0)

    knobs = departing(side(post, gated=gated, act="softplus"))

    assert {knob: fit.value for knob, fit in knobs.items()} == {"mlp.activation": canonical(name)}
    clean = side(ACT2FN[name](PRE) * (LINEAR if gated else 1.0), gated=gated, act=name)
    assert told(side(post, gated=gated, act=name), clean) == {}


def test_the_clamped_one_of_gpt_oss():
    post, plain = clamped(PRE.float(), LINEAR.float()), clamped(PRE, LINEAR, limit=math.inf)

    assert departing(side(post, gated=True))["mlp.activation"].value == "swiglu_clamped"
    found = told(side(plain, gated=True, act="swiglu_clamped"), side(post, gated=True, act="swiglu_clamped"))
    assert {knob: finding.candidate_value for knob, finding in found.items()} == {"mlp.limit": None}


@pytest.mark.parametrize(
    ("gate", "linear", "said"),
    [
        (PRE.clamp(max=7.0), LINEAR, "gate from above"),
        (PRE, LINEAR.clamp(-7.0, 7.0), "linear input"),
        (PRE.clamp(-7.0, 7.0), LINEAR.clamp(-7.0, 7.0), "gate and linear input"),
    ],
)
def test_what_a_clamped_one_clamps(gate: Tensor, linear: Tensor, said: str):
    post = (linear + 1) * gate * torch.sigmoid(1.702 * gate)
    found = told(*(side(made, gated=True, act="swiglu_clamped") for made in (post, clamped(PRE, LINEAR))))

    assert {knob: finding.candidate_value for knob, finding in found.items()} == {"mlp.clamped": said}


@pytest.mark.parametrize(
    ("post", "said"),
    [
        (PRE * torch.sigmoid(1.5 * PRE) * LINEAR, "swish(1.5)"),
        (functional.leaky_relu(PRE, 0.2) * LINEAR, "leaky_relu(0.2)"),
        (0.5 * functional.silu(PRE) * LINEAR, "0.5 * silu"),
        (-1.02 * functional.gelu(PRE) * LINEAR, "-1.02 * gelu"),
        (clamped(PRE, LINEAR, alpha=1.0), "swiglu_clamped(1)"),
        (LINEAR, "none"),
    ],
)
def test_constants_of_their_own(post: Tensor, said: str):
    found = told(side(post, gated=True, act="silu"), side(functional.silu(PRE) * LINEAR, gated=True, act="silu"))

    assert {knob: finding.candidate_value for knob, finding in found.items()} == {"mlp.activation": said}


@pytest.mark.parametrize(
    ("post", "said"),
    [
        (clamped(PRE, LINEAR, limit=5.0), {"mlp.activation": "swiglu_clamped", "mlp.limit": 5.0}),
        (functional.gelu(LINEAR) * PRE, {"mlp.activation": "gelu", "mlp.gate_up": "up activated"}),
        (LINEAR * torch.sigmoid(1.3 * LINEAR) * PRE, {"mlp.activation": "swish(1.3)", "mlp.gate_up": "up activated"}),
    ],
)
def test_two_values_of_their_own(post: Tensor, said: dict[str, object]):
    found = told(side(post, gated=True, act="silu"), side(functional.silu(PRE) * LINEAR, gated=True, act="silu"))

    assert {knob: finding.candidate_value for knob, finding in found.items()} == said


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "silu", "relu2"])
def test_clean_in_bfloat16(gated: bool, act: str):
    low, gate = PRE.bfloat16(), LINEAR.bfloat16()
    post = ACT2FN[act](low) * (gate if gated else 1.0)
    exact = ACT2FN[act](low.double()) * (gate.double() if gated else 1.0)
    inputs = {"mlp.pre": low} | ({"mlp.pre_linear": gate} if gated else {})

    assert told(side(post, gated=gated, act=act, **inputs), side(exact, gated=gated, act=act, **inputs)) == {}


def test_small_inputs_do_not_tell_two_kinds_of_gelu_apart():
    inputs = {"mlp.pre": PRE * 1e-4}
    erf, tanh = (
        side(functional.gelu(PRE.float() * 1e-4, approximate=how), gated=False, **inputs) for how in ("none", "tanh")
    )

    assert told(erf, tanh) == {}


def test_slope_and_limit_of_a_clamped_one():
    sides = (
        side(clamped(PRE, LINEAR, **values), gated=True, act="swiglu_clamped")
        for values in ({"alpha": 1.0, "limit": 3.0}, {})
    )

    found = {knob: finding.candidate_value for knob, finding in told(*sides).items()}

    assert found == {"mlp.activation": "swiglu_clamped(1)", "mlp.limit": pytest.approx(3.0, rel=1e-6)}


@pytest.mark.parametrize(
    ("post", "said"),
    [
        (functional.silu(PRE).bfloat16().double() * LINEAR, "bfloat16 activation"),
        (functional.silu(PRE).half().double() * LINEAR, "float16 activation"),
        (functional.silu(PRE.bfloat16()).double() * LINEAR, "bfloat16 input and activation"),
    ],
)
def test_an_activation_in_a_narrow_dtype_is_told_by_the_place_of_its_rounding(post: Tensor, said: str):
    found = told(side(post, gated=True, act="silu"), side(functional.silu(PRE) * LINEAR, gated=True, act="silu"))

    assert {knob: finding.candidate_value for knob, finding in found.items()} == {"mlp.dtype": said}
