"""What trained weights have and random ones have not led to findings beside the true one: one closed form of each."""

from __future__ import annotations

import pytest
import torch
from loose import departing, loose, told
from tiny_port import probe

from parity_audit.diagnose.evidence import KnobFit
from parity_audit.diagnose.findings import merge, unexplained

PAIRING = "rope.pairing"

HEADS, WIDTH = 6, 32


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_a_bias_takes_no_part_of_the_law_beside_it():
    """Queries lie near their own keys, so the largest products are where the bias is: alone, a law takes it for a cap."""
    item = probe("short", (48,))
    k = drawn(1, 48, HEADS, WIDTH)
    q = 2 * k + drawn(1, 48, HEADS, WIDTH, seed=1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / WIDTH**0.5 + 0.3 * torch.eye(48)
    scores = scores.masked_fill(~torch.ones(48, 48).tril().bool(), -torch.inf)
    sites = {"rot_q": q, "rot_k": k, "v": k, "attn_scores": scores, "pattern": scores.softmax(-1)}
    evidence = loose(sites, probes=(item,), attention__scale=WIDTH**0.5, attention__softcap=None)

    assert {knob: fit.value for knob, fit in departing(evidence).items()} == {
        "attention.bias": {"distance 0": pytest.approx(0.3, rel=1e-6)}
    }


def test_values_that_are_normed_are_no_factor_of_the_heads():
    """One key has nearly all the weight, as a sink has: then values that are normed look like outputs that are scaled."""
    item = probe("short", (48,))
    pattern = torch.full((1, HEADS, 48, 48), 3e-3).tril()
    pattern[..., 0] += 1 - pattern.sum(-1)
    v = drawn(1, 48, HEADS, WIDTH) * torch.linspace(0.5, 2.0, 48)[:, None, None]
    normed = torch.einsum("bhij,bjhd->bihd", pattern, v * v.square().mean(-1, keepdim=True).rsqrt())
    scaled = torch.einsum("bhij,bjhd->bihd", pattern, v) * torch.linspace(0.5, 1.5, HEADS)[:, None]

    def said(z):
        return departing(loose({"pattern": pattern, "v": v, "z": z, "rot_q": v, "rot_k": v}, probes=(item,)))

    assert said(normed) == {}
    assert said(scaled)["attention.heads"].value == pytest.approx(torch.linspace(0.5, 1.5, HEADS).tolist(), rel=1e-5)


def turned(x: torch.Tensor, angles: str) -> torch.Tensor:
    turn = torch.arange(x.shape[1])[:, None] * 1e6 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
    whole = turn.repeat(1, 2) if angles == "half" else turn.repeat_interleave(2, -1)
    a, b = x.chunk(2, -1)
    return x * whole.cos()[:, None] + torch.cat([-b, a], -1) * whole.sin()[:, None]


def test_a_component_that_outweighs_all_others_is_nobodys_partner():
    """An attention sink lies in the slowest pair, next to the place of the first component's partner."""
    item = probe("short", (48,))

    def side(angles):
        sites = {}
        for name in ("q", "k"):
            x = drawn(1, 48, HEADS, WIDTH, seed=len(name))
            x[..., WIDTH // 2 - 1] += 300.0
            sites |= {("short", name): x, ("short", f"rot_{name}"): turned(x.double(), angles).float()}
        return loose(sites, probes=(item,), rope__theta=1e6, rope__pairing="half", rope__scaling=None)

    findings = told(side("adjacent"), side("half"))

    assert findings.keys() == {PAIRING}
    assert findings[PAIRING].candidate_value == "half pairs, turned by the angles of adjacent ones"
    assert told(side("half"), side("half")) == {}


@pytest.mark.parametrize(("hook", "norm"), [("attn_out", "ln1_post.out"), ("mlp_out", "ln2_post.out")])
def test_a_norm_behind_a_sublayer_explains_what_the_sublayer_adds(hook, norm):
    def fit(value, site):
        return KnobFit(knob="norm.eps", layer=3, value=value, stderr=1e-9, residual=1e-7, n=99, site=site)

    def left(site):
        findings = merge([fit(1e-4, site)], [fit(1e-6, site)], {})
        return unexplained({f"blocks.3.{name}": (f"blocks.3.{name}",) for name in (norm, hook)}, findings)

    assert left(norm) == []
    assert [item.site for item in left("ln1.out")] == [f"blocks.3.{norm}", f"blocks.3.{hook}"]
