"""A description is of the projection that a finding names, whatever else is wrong in its block."""

import dataclasses

import pytest
import torch
from held import Held, probe

from parity_audit.core.report import Finding
from parity_audit.diagnose.describe import Replayed, with_descriptions
from parity_audit.diagnose.structure.sample import NOT_STORED

PROBE = probe(length=64)
DRAW = torch.Generator().manual_seed(5)


@dataclasses.dataclass
class Whole(Held):
    """A capture that also gives whole tensors."""

    def __init__(self, tensors):
        super().__init__(PROBE, tensors)

    def tensor(self, probe, site):
        return self.tensors[site]


def test_keys_are_not_described_by_what_happened_to_the_queries():
    true = {f"blocks.1.{name}": torch.randn(1, 64, 2, 8, generator=DRAW) for name in ("q", "k")}
    own = {"blocks.1.q": true["blocks.1.q"] * 1.1, "blocks.1.k": true["blocks.1.k"].clamp(-1.0, 1.0)}
    sides = Replayed(
        own=Whole(own), true=Whole(true), ratios={("short", site): 1e5 for site in own}, d_head=8
    )  # fmt: skip
    keys = Finding(
        knob="weights.attn.k", kind="weights", layers=(1,), site="blocks.1.k", reference_value="the checkpoint's",
        candidate_value=NOT_STORED,
    )  # fmt: skip

    (told,), gaps = with_descriptions([keys], sides)

    assert gaps == []
    assert (told.site, told.knob, told.candidate_value) == ("blocks.1.k", "k.clamp", [-1.0, 1.0])


def test_each_projection_that_departs_is_described_and_what_follows_from_one_is_not():
    names = ("q", "k", "v")
    true = {f"blocks.1.{name}": torch.randn(1, 64, 2, 8, generator=DRAW) for name in names}
    bounds = {"q": 0.8, "k": 1.0, "v": 1.2}
    own = {f"blocks.1.{name}": true[f"blocks.1.{name}"].clamp(-bounds[name], bounds[name]) for name in names}
    sides = Replayed(own=Whole(own), true=Whole(true), ratios={("short", site): 1e5 for site in own}, d_head=8)
    nothing_known = Finding(
        knob="qkv", kind="unexplained", layers=(1,), site="blocks.1.q", reference_value=None, candidate_value=None,
        evidence={"component": "qkv", "sites": sorted(own)},
    )  # fmt: skip

    told, _ = with_descriptions([nothing_known], sides)

    assert {item.knob: item.candidate_value[1] for item in told} == {
        f"{name}.clamp": pytest.approx(bounds[name]) for name in names
    }


def test_layers_that_fit_several_descriptions_have_that_of_most_layers():
    """Queries are normalised in four layers; in one of them all are longer by the same factor, so that a factor would do."""
    sites = [f"blocks.{layer}.q" for layer in range(4)]
    true = {site: torch.randn(1, 64, 2, 8, generator=DRAW) for site in sites}
    own = {site: x / x.square().mean(-1, keepdim=True).sqrt() for site, x in true.items()}
    true["blocks.2.q"] = own["blocks.2.q"] * 3.0
    sides = Replayed(own=Whole(own), true=Whole(true), ratios={("short", site): 1e5 for site in own}, d_head=8)
    nothing_known = Finding(
        knob="qkv", kind="unexplained", layers=(0, 1, 2, 3), site=sites[0], reference_value=None, candidate_value=None,
        evidence={"component": "qkv", "sites": sites},
    )  # fmt: skip

    told, _ = with_descriptions([nothing_known], sides)

    assert [(item.knob, item.candidate_value, item.layers) for item in told] == [
        ("q.norm", "each head normalised to rms 1", (0, 1, 2, 3))
    ]


def test_what_differs_from_layer_to_layer_in_its_measure_alone_is_one_finding_and_other_values_are_several():
    def told(changes):
        true = {f"blocks.{layer}.q": torch.randn(1, 64, 2, 8, generator=DRAW) for layer in (0, 1)}
        own = {site: change(true[site]) for site, change in zip(true, changes, strict=True)}
        sides = Replayed(
            own=Whole(own), true=Whole(true), ratios={("short", site): 1e5 for site in own}, d_head=8
        )  # fmt: skip
        left = Finding(
            knob="qkv", kind="unexplained", layers=(0, 1), site="blocks.0.q", reference_value=None, candidate_value=None,
            evidence={"component": "qkv", "sites": list(own)},
        )  # fmt: skip
        return [(item.knob, item.layers) for item in with_descriptions([left], sides)[0]]

    vectors = [torch.randn(2, 8, generator=DRAW), 3 * torch.randn(2, 8, generator=DRAW)]
    assert told([lambda x, v=v: x + v for v in vectors]) == [("q.bias", (0, 1))]
    assert told([lambda x, by=by: x.roll(by, 1) for by in (1, 2)]) == [("q.position", (0,)), ("q.position", (1,))]


def test_the_output_of_a_sublayer_is_not_described_by_the_norm_whose_output_it_is():
    true, other = (torch.randn(1, 64, 16, generator=DRAW) for _ in range(2))
    own = {"blocks.1.attn_out": other, "blocks.1.ln1_post.out": other.clone()}
    sides = Replayed(
        own=Whole(own), true=Whole({"blocks.1.attn_out": true}), ratios={("short", site): 1e5 for site in own}, d_head=8
    )
    nothing_known = Finding(
        knob="attn_out", kind="unexplained", layers=(1,), site="blocks.1.attn_out", reference_value=None, candidate_value=None,
        evidence={"component": "attn_out", "sites": ["blocks.1.attn_out"]},
    )  # fmt: skip

    assert with_descriptions([nothing_known], sides) == ([nothing_known], [])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("curve", "value"),
    [
        (torch.nn.functional.hardswish, "hardswish"),
        (lambda x: torch.nn.functional.silu(torch.nn.functional.silu(x)), "silu twice"),
        (
            lambda x: torch.where(x > 0.5, x - 0.5, 0.1 * x),
            "another function of its input (-0.2 at -2, -0.1 at -1, 0 at 0, 0.5 at 1, 1.5 at 2)",
        ),
    ],
)
def test_an_activation_that_no_config_names_is_one_function_of_its_input(curve, value, gated):
    told = _behind_an_activation(curve, gated=gated)

    assert (told.knob, told.candidate_value, told.spec_value) == ("mlp.activation", value, "silu")


@pytest.mark.parametrize(
    "curve",
    [
        lambda x: torch.nn.functional.silu(x).bfloat16().to(x),
        lambda x: torch.nn.functional.silu(x.roll(1, -1)),
        lambda x: torch.nn.functional.silu(x * torch.linspace(0.5, 1.5, x.shape[-1])),
        lambda x: torch.nn.functional.silu(x) * (1 + 0.1 * torch.randn(x.shape, generator=DRAW)),
    ],
)
def test_what_is_no_function_of_the_input_alone_is_no_activation(curve):
    """Rounded, moved, scaled by channel, or beside noise."""
    assert _behind_an_activation(curve, gated=True).knob != "mlp.activation"


def _behind_an_activation(curve, *, gated: bool) -> Finding:
    """What is said of an MLP with this activation where the spec's is SiLU."""
    pre, linear = (1.5 * torch.randn(1, 64, 32, generator=DRAW) for _ in range(2))
    factor = linear if gated else torch.ones_like(linear)
    site = "blocks.0.mlp.post"
    own = {site: curve(pre) * factor, "blocks.0.mlp.pre": pre, **({"blocks.0.mlp.pre_linear": linear} if gated else {})}
    true = {site: torch.nn.functional.silu(pre) * factor}
    sides = Replayed(own=Whole(own), true=Whole(true), ratios={("short", site): 1e5}, d_head=8, activation="silu")
    nothing_known = Finding(
        knob="mlp", kind="unexplained", layers=(0,), site=site, reference_value=None, candidate_value=None,
        evidence={"component": "mlp", "sites": [site]},
    )  # fmt: skip
    (told,), gaps = with_descriptions([nothing_known], sides)
    assert gaps == []
    return told
