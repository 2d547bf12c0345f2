"""Norms of q and k against the modules of transformers: axis, eps, offset, missing, on the wrong side of the rotation."""

from __future__ import annotations

import pytest
import torch
from loose import explained, loose
from tiny_port import probe
from torch import Tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

HEADS, D = 4, 32
G = torch.Generator().manual_seed(0)
Q = torch.randn(1, 48, HEADS, D, generator=G, dtype=torch.float64)
Q = Q * 0.05 * torch.rand(1, 48, HEADS, 1, generator=G, dtype=torch.float64).add(0.1)
W = {"head": torch.randn(D, generator=G) * 0.3, "projection": torch.randn(HEADS * D, generator=G) * 0.3,
     "per head": torch.randn(HEADS, D, generator=G) * 0.3}  # fmt: skip
MODULES = ["qwen3", "gemma3", "olmo2", "cohere"]


def normed(q: Tensor, name: str, dtype: torch.dtype, eps: float = 1e-5) -> Tensor:
    """What the module of that model makes of q."""
    with torch.no_grad():
        if name == "olmo2":
            module = Olmo2RMSNorm(HEADS * D, eps=eps).to(dtype)
            module.weight.copy_(1 + W["projection"])
            return module(q.to(dtype).flatten(2)).view_as(q)
        if name == "cohere":
            module = CohereLayerNorm((HEADS, D), eps=eps).to(dtype)
            module.weight.copy_(1 + W["per head"])
        else:
            module = (Gemma3RMSNorm if name == "gemma3" else Qwen3RMSNorm)(D, eps=eps).to(dtype)
            module.weight.copy_(W["head"] if name == "gemma3" else 1 + W["head"])
        return module(q.to(dtype))


def side(name: str, out: Tensor, *, q: Tensor = Q, side: str = "candidate", **more: Tensor):
    weight = {"olmo2": 1 + W["projection"], "cohere": 1 + W["per head"], "gemma3": W["head"]}.get(name, 1 + W["head"])
    sites = {"q": q.float(), "q_norm.out": out.float(), **{name: x.float() for name, x in more.items()}}
    return loose(sites, weights={"norm.q": weight}, side=side, norm__eps=1e-5, norm__offset=float(name == "gemma3"),
                 rope__theta=1e4)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("eps", [1e-6, 1e-4])
def test_the_eps_of_a_module_is_read_as_it_is(name: str, eps: float):
    found = explained(side(name, normed(Q, name, torch.float32, eps)), side(name, normed(Q, name, torch.float64)))

    assert found.keys() == {"qk_norm.eps"}
    assert found["qk_norm.eps"].candidate_value == pytest.approx(eps, rel=1e-3)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [1.0, 200.0])
def test_clean(name: str, dtype: torch.dtype, times: float):
    q = (Q * times).to(dtype).double()

    candidate, reference = (side(name, normed(q, name, kind), q=q) for kind in (dtype, torch.float64))

    assert explained(candidate, reference) == {}


def test_missing():
    found = explained(side("qwen3", Q), side("qwen3", normed(Q, "qwen3", torch.float64)))

    assert found.keys() == {"qk_norm.present"}
    assert (found["qk_norm.present"].candidate_value, found["qk_norm.present"].reference_value) == (
        "missing",
        "present",
    )
    assert found["qk_norm.present"].departs_from_spec == "candidate"


def test_wrong_offset():
    plain = normed(Q, "gemma3", torch.float32) / (1 + W["head"]) * W["head"]

    found = explained(side("gemma3", plain), side("gemma3", normed(Q, "gemma3", torch.float64)))

    assert found.keys() == {"qk_norm.offset"}
    assert found["qk_norm.offset"].candidate_value == pytest.approx(0, abs=1e-4)
    assert found["qk_norm.offset"].spec_value == 1.0


def test_over_the_wrong_axis():
    m = Q.square().mean((-1, -2), keepdim=True)
    over_all = Q * (m + 1e-5).rsqrt() * (1 + W["head"])

    found = explained(side("qwen3", over_all), side("qwen3", normed(Q, "qwen3", torch.float64)))

    assert found["qk_norm.axis"].candidate_value == "projection"


def rotated(q: Tensor, times: float = 1.0) -> Tensor:
    angle = times * torch.arange(48)[:, None] * 10000.0 ** (-torch.arange(D // 2) / (D // 2))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None].to(torch.complex128)
    turned = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (2, D // 2)).movedim(-2, -1).contiguous()) * turn)
    return turned.movedim(-1, -2).flatten(-2)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_after_the_rotation(name: str):
    found = explained(
        side(name, normed(rotated(Q), name, torch.float32)), side(name, normed(Q, name, torch.float64))
    )  # fmt: skip

    assert found.keys() == {"qk_norm.order"}
    assert found["qk_norm.order"].candidate_value == "after rotation"
    assert found["qk_norm.order"].spec_value == "before rotation"


def test_causes_that_are_known_from_other_sites_explain_one_together():
    """A long text shows keys before their norm and behind the rotation: both are wrong between, and nothing else is."""
    probes = (probe("short", (48,)), probe("long", (48,), sites="stream"))

    def shown(q_normed: Tensor, k_normed: Tensor, times: float, side: str):
        sites = {"q": Q, "q_norm.out": q_normed, "rot_q": rotated(q_normed, times), "k": Q}
        short = sites | {"k_norm.out": k_normed, "rot_k": rotated(k_normed, times)}
        held = {("short", name): x.float() for name, x in short.items()}
        held |= {("long", name): x.float() for name, x in short.items() if not name.endswith("_norm.out")}
        weights = {"norm.q": 1 + W["head"], "norm.k": 1 + W["head"]}
        return loose(held, weights=weights, probes=probes, side=side, norm__eps=1e-5, norm__offset=0.0, rope__theta=1e4)

    right = normed(Q, "qwen3", torch.float64)

    found = explained(shown(right, Q, 0.5, "candidate"), shown(right, right, 1.0, "reference"))

    assert found.keys() == {"qk_norm.present", "rope.scaling"}
    assert found["rope.scaling"].candidate_value == {"rope_type": "linear", "factor": 2.0}


def test_a_norm_without_weights_does_not_undo_a_temperature_by_position():
    """Both stand behind the rotation, the norm first (Llama 4 has them in different layers)."""
    turned = rotated(Q)
    unit = turned * (turned.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    growth = 1 + 0.1 * torch.log1p(((torch.arange(48) + 1) / 16).floor())[None, :, None, None]

    def shown(rot_q: Tensor, side: str):
        return loose(
            {"q": Q.float(), "rot_q": rot_q.float()}, side=side, norm__eps=1e-5, qk_norm__weighted=False, rope__theta=1e4,
            attention__temperature_by_position={"scale": 0.1, "step": 16},
        )  # fmt: skip

    right = shown(unit * growth, "reference")

    assert explained(shown(unit * growth, "candidate"), right) == {}
    assert explained(shown(unit, "candidate"), right).keys() == {"attention.temperature_by_position"}


def test_a_model_without_them_is_silent():
    plain = loose({"q": Q.float(), "rot_q": Q.float()}, rope__theta=None)

    assert explained(plain, plain) == {}
