"""Norms against torch's and transformers' own modules: kind, bias, eps and its place, arithmetic, whose weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loose import differ, loose, read
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


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_modules_are_read_as_they_are(kind: str, eps: float):
    out = rms(X, torch.float32, eps=eps) if kind == "rms" else layer_norm(X, torch.float32, eps=eps)

    knobs = read(of(X, out, bias=kind == "layer"), "norm")

    assert knobs["norm.kind"].value == kind
    assert knobs["norm.eps"].value == pytest.approx(eps, rel=0.01, abs=5e-9)
    assert knobs["norm.offset"].value == pytest.approx(0, abs=1e-5)
    assert knobs["norm.gain"].value == 1.0
    words = {name: knobs[f"norm.{name}"].value for name in ("weight", "bias", "dtype")}
    assert words == {"weight": "the checkpoint's", "bias": "the checkpoint's", "dtype": "full"}


@pytest.mark.parametrize("x", [X, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [rms, layer_norm])
def test_clean_modules(x: Tensor, dtype: torch.dtype, module: Callable[..., Tensor]):
    bias = module is layer_norm
    x = x.to(dtype).double()

    candidate, reference = of(x, module(x, dtype), bias=bias), of(x, module(x, torch.float64), bias=bias)

    assert differ(candidate, reference) == {}


def test_missing_and_surplus_bias():
    missing = of(X, layer_norm(X, torch.float32, bias=False), bias=True)
    surplus = of(X, layer_norm(X, torch.float32))
    plain = of(X, layer_norm(X, torch.float64, bias=False), norm__kind="layer")

    assert differ(missing, LAYER).keys() == {"norm.bias"}
    assert differ(missing, LAYER)["norm.bias"].candidate_value == "missing"
    assert differ(surplus, plain)["norm.bias"].candidate_value == "not in the checkpoint"


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_eps_outside_the_root(eps: float):
    candidate = of(X, by_hand(X, lambda m: m.sqrt() + eps))

    knobs = read(candidate, "norm")

    assert knobs["norm.eps_place"].value == "outside the root"
    assert knobs["norm.eps"].value == pytest.approx(eps, rel=0.01)
    assert "norm.eps_place" in differ(candidate, RMS)


def test_eps_as_a_lower_bound():
    knobs = read(of(X, by_hand(X, lambda m: m.clamp_min(4e-3).sqrt())), "norm")

    assert knobs["norm.eps_place"].value == "lower bound"
    assert knobs["norm.eps"].value == pytest.approx(4e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("factor", "said"),
    [(D / (D - 1), "a variance divided by n - 1"), (float(D), "a sum in place of the mean"), (1.7, None)],
)
@pytest.mark.parametrize("x", [X, LARGE], ids=["small", "large"])
def test_a_common_factor(x: Tensor, factor: float, said: str | None):
    candidate = of(x, by_hand(x, lambda m: (factor * m + 1e-5).sqrt()))

    found = differ(candidate, of(x, rms(x, torch.float64)))

    assert found["norm.gain"].candidate_value == pytest.approx(factor**-0.5, rel=1e-5)
    assert found["norm.gain"].departs_from_spec == "candidate"
    assert found["norm.gain"].evidence["candidate"][0].get("as_from") == said


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(D), "none"),
        (W**2, "the checkpoint's, applied twice"),
        (W.flip(0), "norm.ln2"),
        (W.roll(1), "another"),
    ],
)
def test_another_weight(weight: Tensor, said: str):
    unit = by_hand(X, lambda m: (m + 1e-5).sqrt()) / W.float()

    finding = differ(of(X, unit * weight.float()), RMS)["norm.weight"]

    assert (finding.candidate_value, finding.departs_from_spec) == (said, "candidate")


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
        found = differ(of(X, out), RMS)
        assert found.keys() == {"norm.dtype"}, said
        assert found["norm.dtype"].candidate_value == said


def test_the_whole_module_in_bfloat16_is_called_low_precision():
    found = differ(of(X, rms(X, torch.bfloat16)), RMS)

    assert found.keys() == {"norm.dtype"}
    assert found["norm.dtype"].candidate_value.startswith("bfloat16")


def test_noise_that_is_no_rounding_is_not_called_so():
    noise = torch.randn(X.shape, generator=torch.Generator().manual_seed(3)) * 2e-3

    assert read(of(X, rms(X, torch.float32) + noise), "norm")["norm.dtype"].value == "full"


def test_a_norm_without_a_weight():
    unit = by_hand(LARGE, lambda m: (m + 1e-5).sqrt()) / W.float()
    sides = [loose({"resid_pre": LARGE.float(), "ln1.out": unit.to(dtype).float()}, norm__kind="rms")
             for dtype in (torch.float32, torch.float64)]  # fmt: skip

    assert read(sides[0], "norm")["norm.weight"].value == "none"
    assert differ(*sides) == {}


@pytest.mark.parametrize("where", ["embed_ln.out", "ln_final.out"])
def test_norms_outside_the_blocks(where: str):
    into, role = ("embed", "norm.embed_ln") if where == "embed_ln.out" else ("blocks.0.resid_post", "norm.final")

    def side(eps: float, dtype: torch.dtype):
        sites = {into: X.float(), where: layer_norm(X, dtype, eps=eps).float()}
        return loose(sites, weights={role: W, f"{role}.bias": B}, layer=None, norm__kind="layer", norm__eps=1e-5)

    assert differ(side(1e-5, torch.float32), side(1e-5, torch.float64)) == {}
    assert differ(side(1e-6, torch.float32), side(1e-5, torch.float64)).keys() == {"norm.eps"}


def test_a_parallel_block_reads_its_second_norm_from_resid_pre():
    sides = [loose({"resid_pre": X.float(), "ln2.out": layer_norm(X, torch.float32, eps=eps).float()},
                   weights={"norm.ln2": W, "norm.ln2.bias": B}, norm__kind="layer", norm__eps=1e-5)
             for eps in (1e-5, 1e-6)]  # fmt: skip

    assert read(sides[0], "norm")["norm.eps"].value == pytest.approx(1e-5, rel=0.01)
    assert differ(sides[1], sides[0]).keys() == {"norm.eps"}


def test_a_norm_that_is_skipped():
    found = differ(of(X, X), RMS)

    assert found.keys() == {"norm.kind"}
    assert (found["norm.kind"].candidate_value, found["norm.kind"].departs_from_spec) == ("none", "candidate")


@pytest.mark.parametrize(
    ("size", "said"),
    [(lambda x: x.abs().mean(-1), "mean absolute value"), (lambda x: x.abs().amax(-1), "largest absolute value")],
)
def test_what_a_vector_is_divided_by(size, said):
    x = X.float()
    found = differ(of(X, x / (size(x)[..., None] + 1e-6) * W.float()), RMS)

    assert found.keys() == {"norm.size"}
    assert found["norm.size"].candidate_value == said
