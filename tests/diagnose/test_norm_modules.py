"""Norms against torch's and transformers' own modules: kind, bias, eps and its place, arithmetic, whose weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from loose import explained, loose
from torch import Tensor, nn

D = 96
G = torch.Generator().manual_seed(0)
X = torch.randn(1, 48, D, generator=G, dtype=torch.float64) * 0.02 * (1 + torch.arange(48)[None, :, None] / 8) + 0.004
LARGE = X * 1000
W = 1 + 0.3 * torch.randn(D, generator=G, dtype=torch.float64)
B = 0.2 * torch.randn(D, generator=G, dtype=torch.float64)


def layer_norm(x: Tensor, dtype: torch.dtype, *, eps: float = 1e-5, bias: bool = True) -> Tensor:
    module = nn.LayerNorm(D, eps=eps, bias=bias, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(W)
        if bias:
            module.bias.copy_(B)
        return module(x.to(dtype))


def rms(x: Tensor, dtype: torch.dtype, *, eps: float = 1e-5) -> Tensor:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(D, eps=eps).to(dtype)
    with torch.no_grad():
        module.weight.copy_(W)
        return module(x.to(dtype))


def by_hand(x: Tensor, root: Callable[[Tensor], Tensor], *, centre: bool = False) -> Tensor:
    x = (x - x.mean(-1, keepdim=True) if centre else x).float()
    return x / root(x.square().mean(-1, keepdim=True)) * W.float()


def of(x: Tensor, out: Tensor, *, side: str = "candidate", bias: bool = False, **knobs: object):
    weights = {"norm.ln1": W.float(), "norm.ln2": W.float().flip(0)} | ({"norm.ln1.bias": B.float()} if bias else {})
    usual = {"norm__eps": 1e-5, "norm__kind": "layer" if bias else "rms", "norm__offset": 0.0}
    return loose({"resid_pre": x.float(), "ln1.out": out.float()}, weights=weights, side=side, **(usual | knobs))


RMS, LAYER = of(X, rms(X, torch.float64), side="reference"), of(X, layer_norm(X, torch.float64), bias=True)


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_eps_of_a_module_is_read_as_it_is(kind: str, eps: float):
    out = rms(X, torch.float32, eps=eps) if kind == "rms" else layer_norm(X, torch.float32, eps=eps)

    found = explained(of(X, out, bias=kind == "layer"), RMS if kind == "rms" else LAYER)

    assert found.keys() == {"norm.eps"}
    assert found["norm.eps"].candidate_value == pytest.approx(eps, rel=1e-3, abs=5e-9)
    assert found["norm.eps"].departs_from_spec == "candidate"


def test_inputs_that_are_too_large_to_show_an_eps_are_not_accused_of_one():
    assert explained(of(LARGE, rms(LARGE, torch.float32, eps=1e-6)), of(LARGE, rms(LARGE, torch.float64))) == {}


@pytest.mark.parametrize("x", [X, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [rms, layer_norm])
def test_clean_modules(x: Tensor, dtype: torch.dtype, module: Callable[..., Tensor]):
    bias = module is layer_norm
    x = x.to(dtype).double()

    candidate, reference = of(x, module(x, dtype), bias=bias), of(x, module(x, dtype).double(), bias=bias)

    assert explained(candidate, reference) == {}


def test_a_bias_that_is_added_twice():
    twice = layer_norm(X, torch.float32) + B.float()
    found = explained(of(X, twice, bias=True), LAYER)

    assert {knob: finding.candidate_value for knob, finding in found.items()} == {
        "norm.bias": "the checkpoint's times 2"
    }


def test_a_missing_bias():
    found = explained(of(X, layer_norm(X, torch.float32, bias=False), bias=True), LAYER)

    assert found.keys() == {"norm.bias"}
    assert found["norm.bias"].candidate_value == "missing"


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_other_kind(kind: str):
    out = layer_norm(X, torch.float32, bias=False) if kind == "rms" else rms(X, torch.float32) + B.float()

    found = explained(of(X, out, bias=kind == "layer"), RMS if kind == "rms" else LAYER)

    assert found.keys() == {"norm.kind"}
    assert (found["norm.kind"].reference_value, found["norm.kind"].candidate_value) == (
        kind,
        "layer" if kind == "rms" else "rms",
    )


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_eps_outside_the_root(eps: float):
    found = explained(of(X, by_hand(X, lambda m: m.sqrt() + eps)), RMS)

    assert found["norm.eps_place"].candidate_value == "outside the root"
    assert "norm.eps" not in found if eps == 1e-5 else found["norm.eps"].candidate_value == pytest.approx(eps, rel=0.01)


@pytest.mark.parametrize(
    ("factor", "said"),
    [(D / (D - 1), "root of the squares over n - 1"), (float(D), "root of the sum of squares"), (1.7, None)],
)
@pytest.mark.parametrize("x", [X, LARGE], ids=["small", "large"])
def test_a_common_factor_and_where_it_comes_from(x: Tensor, factor: float, said: str | None):
    found = explained(of(x, by_hand(x, lambda m: (factor * m + 1e-5).sqrt())), of(x, rms(x, torch.float64)))

    if said is not None:
        assert found.keys() == {"norm.size"}
        assert found["norm.size"].candidate_value == said
    else:
        assert found["norm.gain"].candidate_value == pytest.approx(factor**-0.5, rel=1e-5)
        assert found["norm.gain"].departs_from_spec == "candidate"


@pytest.mark.parametrize(
    ("weight", "said"),
    [(torch.ones(D), "none"), (W**2, "the checkpoint's, applied twice"), (W.flip(0), "norm.ln2")],
)
def test_another_weight(weight: Tensor, said: str):
    unit = by_hand(X, lambda m: (m + 1e-5).sqrt()) / W.float()

    finding = explained(of(X, unit * weight.float()), RMS)["norm.weight"]

    assert (finding.candidate_value, finding.departs_from_spec) == (said, "candidate")


def test_a_weight_that_nobody_has_is_given_no_constant():
    unit = by_hand(X, lambda m: (m + 1e-5).sqrt()) / W.float()

    assert explained(of(X, unit * W.roll(1).float()), RMS) == {}


def test_weights_that_were_rounded_are_no_eps():
    out = by_hand(X, lambda m: (m + 1e-5).sqrt()) / W.float() * W.to(torch.bfloat16).float()

    found = explained(of(X, out), RMS)

    assert found.keys() == {"norm.dtype"}
    assert found["norm.dtype"].candidate_value == "bfloat16 weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inside_a_float32_model(dtype: torch.dtype):
    name, eps = str(dtype).removeprefix("torch."), 1e-5
    x = X.float()
    unit = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    places = {
        f"{name} before the weight": unit.to(dtype).float() * W.float(),
        f"{name} out": (unit * W.float()).to(dtype).float(),
        f"{name} in": rms(x.to(dtype).double(), torch.float64).float(),
    }

    for said, out in places.items():
        found = explained(of(X, out), RMS)
        assert found.keys() == {"norm.dtype"}, said
        assert found["norm.dtype"].candidate_value == said


def test_the_whole_module_in_bfloat16_is_called_low_precision():
    found = explained(of(X, rms(X, torch.bfloat16)), RMS)

    assert found.keys() == {"norm.dtype"}
    assert found["norm.dtype"].candidate_value.startswith("bfloat16")


def test_noise_is_no_rounding_and_no_constant():
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(3)) * 2e-3

    assert explained(of(X, rms(X, torch.float32) + noise), RMS) == {}


@pytest.mark.parametrize(("offset", "said"), [(0.0, None), (1.0, 1.0)])
def test_a_run_in_bfloat16_is_held_to_the_rounding_of_bfloat16(offset: float, said: float | None):
    x = X.to(torch.bfloat16)
    right, made = rms(x, torch.bfloat16), rms(x, torch.bfloat16) * ((offset + W) / W).to(torch.bfloat16)
    sides = [of(x.double(), out) for out in (made, right)]

    found = explained(*({layer: replace(one, dtype="bfloat16") for layer, one in side.items()} for side in sides))

    assert {knob: item.candidate_value for knob, item in found.items()} == (
        {} if said is None else {"norm.offset": said}
    )


@pytest.mark.parametrize("where", ["embed_ln.out", "ln_final.out"])
def test_norms_outside_the_blocks(where: str):
    into, role = ("embed", "norm.embed_ln") if where == "embed_ln.out" else ("blocks.0.resid_post", "norm.final")

    def side(eps: float, dtype: torch.dtype):
        sites = {where: layer_norm(X, dtype, eps=eps).float()} | ({into: X.float()} if into == "embed" else {})
        outside = loose(sites, weights={role: W, f"{role}.bias": B}, layer=None, norm__kind="layer", norm__eps=1e-5)
        return outside | (loose({"resid_post": X.float()}) if into != "embed" else {})

    assert explained(side(1e-5, torch.float32), side(1e-5, torch.float64)) == {}
    assert explained(side(1e-6, torch.float32), side(1e-5, torch.float64)).keys() == {"norm.eps"}


def test_a_norm_that_is_skipped():
    found = explained(of(X, X), RMS)

    assert found.keys() == {"norm.kind"}
    assert (found["norm.kind"].candidate_value, found["norm.kind"].departs_from_spec) == ("none", "candidate")


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (lambda x: x.abs().mean(-1), "mean absolute value"),
        (lambda x: x.abs().amax(-1), "largest absolute value"),
        (lambda x: torch.ones(x.shape[:-1]), "nothing"),
    ],
)
def test_what_a_vector_is_divided_by(size, said):
    x = LARGE.float()
    found = explained(of(LARGE, x / size(x)[..., None] * W.float()), of(LARGE, rms(LARGE, torch.float64)))

    assert found.keys() == {"norm.size"}
    assert found["norm.size"].candidate_value == said
