"""The judgement between two fits: what differs, which side departs, which layers, and what stays unexplained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from held import Held, probe

from parity_audit.core.report import Finding
from parity_audit.diagnose.evidence import KnobFit
from parity_audit.diagnose.findings import merge, unexplained
from parity_audit.diagnose.localise import introduced_ratios, origins
from parity_audit.specs.schema import ResolvedKnob

SCALE_OF_8 = {"attention.scale": ResolvedKnob(value=8.0)}
SPEC = {"attention.scale": ResolvedKnob(value=16.0), "mlp.activation": ResolvedKnob(value="silu"),
        "attention.window": ResolvedKnob(value=4096, layers=(0,))}  # fmt: skip


def made_of(inputs: Mapping[str, Sequence[str]]) -> Callable[[str], Sequence[str]]:
    """The sites that a site is made of, none where nothing is said."""
    return lambda site: inputs.get(site, ())


def fit(
    value: object, layer: int | None = 0, *, knob: str = "attention.scale", stderr: float | None = 1e-6, **more
) -> KnobFit:
    return KnobFit(knob=knob, layer=layer, value=value, stderr=stderr, residual=1e-7, n=99, site="attn_scores", **more)


def test_values_of_two_sites_are_compared_each_with_its_own():
    """The same on both sides, read off queries and keys in another dtype."""
    queries, keys = fit("full", stderr=None), dataclasses.replace(fit("float32", stderr=None), site="attn_probs")

    assert not merge([queries, keys], [queries, keys], SPEC)
    assert not merge([keys], [queries, keys], SPEC)
    assert merge([keys], [queries], SPEC)


def test_far_apart_is_a_finding_with_every_number():
    (finding,) = merge([fit(14.9666)], [fit(16.0)], SPEC)

    assert (finding.candidate_value, finding.reference_value, finding.spec_value) == (14.9666, 16.0, 16.0)
    assert (finding.layers, finding.site, finding.kind) == ((0,), "blocks.0.attn_scores", "constant")
    assert finding.evidence["candidate"][0]["stderr"] == 1e-6
    assert finding.confidence > 0.95
    assert "14.9666" in finding.message


@pytest.mark.parametrize(
    ("candidate", "stderr"), [(16.5, 0.2), (16.001, 1e-9), (16.0, 0.0)], ids=["within error", "immaterial", "equal"]
)
def test_rounding_is_no_finding(candidate: float, stderr: float):
    assert merge([fit(candidate, stderr=stderr)], [fit(16.0, stderr=stderr)], SPEC) == []


def test_a_knob_fitted_on_one_side_only_is_no_finding():
    assert merge([fit(14.0)], [], SPEC) == []


@pytest.mark.parametrize(
    ("candidate", "reference", "side"),
    [(14.9, 16.0, "candidate"), (16.0, 14.9, "reference"), (14.9, 15.2, "both"), (16.016, 16.0, "candidate")],
)
def test_which_side_departs(candidate: float, reference: float, side: str):
    (finding,) = merge([fit(candidate)], [fit(reference)], SPEC)

    assert finding.departs_from_spec == side


def test_slopes_are_told_beside_slopes():
    slopes = [0.5, 0.25, 0.125, 0.0625]
    candidate, reference = (fit(value, knob="attention.alibi", stderr=None) for value in (slopes, 1.0))
    (finding,) = merge([candidate], [reference], {"attention.alibi": ResolvedKnob(value=1.0)})

    usual = [0.25, 0.0625, 0.015625, 0.00390625]
    assert (finding.candidate_value, finding.reference_value, finding.spec_value) == (slopes, usual, usual)


def test_equal_errors_of_several_layers_are_one_finding():
    wrong, right = [fit(15.0 + 1e-7 * k, k) for k in range(4)], [fit(16.0, k) for k in range(4)]

    assert [finding.layers for finding in merge(wrong, right, SPEC)] == [None]
    assert [finding.layers for finding in merge([*wrong[:2], *right[2:]], right, SPEC)] == [(0, 1)]


def test_a_constant_that_every_layer_has_to_the_last_digit_is_that_constant():
    """A weighted mean of equal numbers may end in another digit."""
    errors = (1.1e-7, 2.3e-7, 0.7e-7)
    (finding,) = merge(
        [fit(1e6, k, stderr=error) for k, error in enumerate(errors)], [fit(5e5, k) for k in range(3)], SPEC
    )

    assert finding.candidate_value == 1e6


def test_what_a_spec_says_layer_by_layer_is_one_finding():
    said = [8.0, 16.0, 24.0, 32.0]
    known = {"attention.scale": ResolvedKnob(value=said, by_layer=True)}
    (finding,) = merge(
        [fit(8.0 + 1e-7 * k, k) for k in range(4)], [fit(value, k) for k, value in enumerate(said)], known
    )

    assert (finding.layers, finding.kind, finding.departs_from_spec) == ((1, 2, 3), "constant", "candidate")
    assert finding.candidate_value == pytest.approx(8.0)
    assert finding.reference_value == finding.spec_value == {"by_layer": {"1": 16.0, "2": 24.0, "3": 32.0}}
    assert (
        merge([fit(value, k) for k, value in enumerate(said)], [fit(value, k) for k, value in enumerate(said)], known)
        == []
    )


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_a_number_that_changes_from_layer_to_layer_is_one_finding(side):
    changing, constant = [fit(8.0 * (k + 1), k) for k in range(4)], [fit(8.0, k) for k in range(4)]
    other = "reference" if side == "candidate" else "candidate"
    sides = {side: changing, other: constant}
    (finding,) = merge(sides["candidate"], sides["reference"], SCALE_OF_8)

    assert (finding.layers, finding.departs_from_spec) == ((1, 2, 3), side)
    assert getattr(finding, f"{side}_value") == {"by_layer": {"1": 16.0, "2": 24.0, "3": 32.0}}
    assert getattr(finding, f"{other}_value") == finding.spec_value == 8.0
    assert f"16 in layer 1; 24 in layer 2; 32 in layer 3 in the {side}" in finding.message


def test_three_errors_of_what_a_spec_says_otherwise_in_one_layer_are_three():
    said = ResolvedKnob(value=16.0, layers=(0, 1), off=12.0)
    wrong, right = [fit(20.0 + k, k) for k in range(3)], [fit(said.at(k), k) for k in range(3)]

    assert len(merge(wrong, right, {"attention.scale": said})) == 3


def test_different_errors_are_different_findings():
    findings = merge([fit(15.0, 0), fit(12.0, 1)], [fit(16.0, 0), fit(16.0, 1)], SPEC)

    assert [(finding.layers, finding.candidate_value) for finding in findings] == [((0,), 15.0), ((1,), 12.0)]


def test_a_blunt_layer_counts_with_the_sharp_one():
    findings = merge([fit(15.0, 0), fit(15.1, 1, stderr=0.3)], [fit(16.0, 0), fit(15.9, 1, stderr=0.3)], SPEC)

    assert [finding.layers for finding in findings] == [None]
    assert findings[0].evidence["consistent_but_not_decisive"] == ["blocks.1.attn_scores"]


def test_a_value_that_leaves_nothing_in_one_layer_is_of_that_layer():
    """A factor of exactly one half has no error: the other layers are asked whether they admit it all the same."""
    findings = merge(
        [fit(8.0, 0, stderr=0.0), fit(16.0, 1, stderr=0.0)], [fit(16.0, 0, stderr=0.0), fit(16.0, 1, stderr=0.0)], SPEC
    )

    assert [(finding.layers, finding.candidate_value) for finding in findings] == [((0,), 8.0)]


def test_ties_are_never_picked():
    tied = fit("gelu", knob="mlp.activation", stderr=None, evidence={"tied_with": ["silu"]})
    sure = fit("silu", knob="mlp.activation", stderr=None)

    assert merge([tied], [sure], SPEC) == []
    assert len(merge([dataclasses.replace(tied, evidence={})], [sure], SPEC)) == 1
    (finding,) = merge([tied], [dataclasses.replace(sure, value="relu")], SPEC)
    assert finding.evidence["tied_with"] == ["silu"]
    assert finding.confidence < 0.7


def test_windows_that_differ_by_one_are_two():
    def window(value: int | None) -> KnobFit:
        return fit(value, knob="attention.window", stderr=None)

    assert merge([window(4096)], [window(4096)], SPEC) == []
    for wrong in (4095, 4097, None):
        (finding,) = merge([window(wrong)], [window(4096)], SPEC)
        assert (finding.candidate_value, finding.reference_value) == (wrong, 4096)


def test_what_no_finding_covers_is_unexplained():
    (finding,) = merge([fit(15.0)], [fit(16.0)], SPEC)

    assert unexplained(origins({("short", "blocks.0.attn_scores"): 99.0}, made_of({})), [finding]) == []
    wrong = ("logits", "blocks.0.attn_scores", "blocks.2.attn_scores", "blocks.1.mlp.post")
    left = unexplained({site: (site,) for site in wrong}, [finding])
    assert [(item.knob, item.layers, item.site) for item in left] == [
        ("mlp", (1,), "blocks.1.mlp.post"), ("scores", (2,), "blocks.2.attn_scores"), ("logits", None, "logits"),
    ]  # fmt: skip
    assert {item.kind for item in left} == {"unexplained"}


def test_what_may_come_from_a_site_that_is_listed_is_not_listed_again():
    """A long text does not show the MLP's hidden layer, so that its error is seen at the output there."""
    shown = {
        ("short", "blocks.1.mlp.post"): 99.0,
        ("short", "blocks.1.mlp_out"): 1.0,
        ("long", "blocks.1.mlp_out"): 99.0,
    }
    both = shown | {("short", "blocks.1.mlp_out"): 99.0}

    inputs = {"blocks.1.mlp_out": ["blocks.1.mlp_proj"], "blocks.1.mlp_proj": ["blocks.1.mlp.post"]}
    assert [item.site for item in unexplained(origins(shown, made_of(inputs)), [])] == ["blocks.1.mlp.post"]
    assert [item.site for item in unexplained(origins(both, made_of(inputs)), [])] == [
        "blocks.1.mlp.post",
        "blocks.1.mlp_out",
    ]


def test_a_projection_explains_its_own_output_and_no_other_of_the_block():
    q = Finding(
        knob="weights.attn.q.scale", kind="weights", layers=(1,), site="blocks.1.q", reference_value=1.0,
        candidate_value=1.1, evidence={"candidate": [{"layer": 1, "read_from": "q"}]},
    )  # fmt: skip

    left = unexplained({site: (site,) for site in ("blocks.1.q", "blocks.1.k")}, [q])

    assert [(item.site, item.evidence["sites"]) for item in left] == [("blocks.1.k", ["blocks.1.k"])]


@pytest.mark.parametrize("knob", ["weights.moe.router", "norm.kind"])
def test_weights_of_a_router_follow_its_own_logits(knob):
    tensor = Finding(
        knob=knob, kind="weights", layers=(1,), site="blocks.1.mlp.router_logits", reference_value="own",
        candidate_value="rounded", evidence={"candidate": [{"layer": 1, "read_from": "mlp.router_logits"}]},
    )  # fmt: skip

    assert unexplained({"blocks.1.mlp.router_weights": ("blocks.1.mlp.router_weights",)}, [tensor]) == []


def test_an_error_that_a_probe_shows_late_may_come_from_what_it_hides():
    output = Finding(
        knob="weights.attn.o.scale", kind="weights", layers=(0,), site="blocks.0.attn_proj", reference_value=1.0,
        candidate_value=0.8, evidence={"candidate": [{"layer": 0, "read_from": "attn_proj"}]},
    )  # fmt: skip
    fine = {("long", "blocks.0.z"): 1.0, ("short", "blocks.0.z"): 1.0}
    late = fine | {("long", "blocks.0.attn_out"): 99.0}

    inputs = made_of({"blocks.0.attn_out": ["blocks.0.attn_proj"], "blocks.0.attn_proj": ["blocks.0.z"]})

    assert unexplained(origins(late, inputs), [output]) == []
    both_shown = late | {("short", "blocks.0.attn_proj"): 99.0, ("short", "blocks.0.attn_out"): 99.0}
    assert [item.site for item in unexplained(origins(both_shown, inputs), [output])] == ["blocks.0.attn_out"]


@pytest.mark.parametrize("inputs", [
    {"mlp_out": ["ln1.out"]},
    {"mlp_out": ["mlp.post"], "mlp.post": ["ln1.out"], "ln1.out": ["resid_pre"]},
    {"mlp_out": ["resid_mid"], "resid_mid": ["resid_pre", "attn_out", "laurel.out"], "laurel.out": ["ln1.out"]},
])  # fmt: skip
def test_an_error_may_come_from_whatever_a_site_is_made_of_that_is_hidden(inputs: dict[str, list[str]]):
    """An MLP may read the norm of the attention (GPT-J), and a residual of low rank stands beside attention (Gemma 3n)."""
    eps = Finding(
        knob="norm.eps", kind="constant", layers=(0,), site="blocks.0.ln1.out", reference_value=1e-5, candidate_value=1e-3,
        evidence={"candidate": [{"layer": 0, "read_from": "ln1.out"}]},
    )  # fmt: skip
    stream_alone = {("batch", f"blocks.0.{site}"): ratio for site, ratio in (("resid_pre", 1.0), ("mlp_out", 99.0))}

    found = origins(
        stream_alone,
        made_of({f"blocks.0.{site}": [f"blocks.0.{one}" for one in read] for site, read in inputs.items()}),
    )

    assert unexplained(found, [eps]) == []
    own_norm = made_of({"blocks.0.mlp_out": ["blocks.0.ln2.out"], "blocks.0.ln2.out": ["blocks.0.resid_pre"]})
    (left,) = unexplained(origins(stream_alone, own_norm), [eps])
    assert left.site == "blocks.0.mlp_out"


def test_what_is_a_part_of_a_site_that_is_listed_is_not_listed_again():
    """The active stream is a part of all streams (Gemma 3n), and shown beside them."""
    both = {("batch", f"blocks.0.{site}"): 99.0 for site in ("altup.post", "resid_post")}
    inputs = made_of(
        {"blocks.0.resid_post": ["blocks.0.altup.post"], "blocks.0.altup.post": ["blocks.0.altup.corrected"]}
    )
    share = Finding(
        knob="altup.share_offset", kind="constant", layers=(0,), site="blocks.0.altup.corrected", reference_value=1.0,
        candidate_value=0.0, evidence={"candidate": [{"layer": 0, "read_from": "altup.corrected"}]},
    )  # fmt: skip

    assert unexplained(origins(both, inputs), [share]) == []
    assert [item.site for item in unexplained(origins(both, inputs), [])] == ["blocks.0.altup.post"]


@pytest.mark.parametrize(("wrong", "read", "origin"), [
    ("blocks.9.attn_scores", "blocks.4.rot_k", "blocks.4.rot_k"),
    ("blocks.9.resid_mid", "blocks.9.altup.active", "blocks.9.altup.predicted"),
])  # fmt: skip
def test_an_error_may_come_from_before_a_shown_site_of_which_another_tensor_is_read(wrong: str, read: str, origin: str):
    """Keys that several layers share, and a stream that is a part of what the residual is computed from."""
    inputs = made_of({wrong: [read], "blocks.9.altup.active": ["blocks.9.altup.predicted"]})

    found = origins({("short", read): 1.0, ("short", wrong): 99.0}, inputs)

    assert origin in found[wrong]


@pytest.mark.parametrize(
    ("wrong", "read"), [("blocks.9.resid_pre", "blocks.8.resid_post"), ("blocks.9.ln1.out", "blocks.9.resid_pre")]
)
def test_the_stream_ends_where_it_is_shown(wrong: str, read: str):
    shown = {("short", read): 1.0, ("short", "blocks.9.altup.pre"): 1.0, ("short", wrong): 99.0}

    assert origins(shown, made_of({wrong: [read]})) == {wrong: (wrong,)}


def test_an_error_does_not_come_from_what_a_shown_site_is_made_of():
    shown = {("batch", "blocks.0.attn_out"): 1.0, ("batch", "blocks.0.resid_mid"): 99.0}
    inputs = made_of({"blocks.0.resid_mid": ["blocks.0.attn_out"], "blocks.0.attn_out": ["blocks.0.ln1.out"]})

    assert origins(shown, inputs) == {"blocks.0.resid_mid": ("blocks.0.resid_mid",)}


@pytest.mark.parametrize(("tokens", "ratio"), [(1, 10 / 8**0.5), (2, 10 / 4**0.5), (8, 10.0), (64, 10.0)])
def test_of_few_tokens_more_counts_as_rounding(tokens: int, ratio: float):
    own, site = probe(length=tokens), "blocks.0.ln1.out"
    true = torch.ones(1, tokens, 16, dtype=torch.float64)
    judge, reference, candidate = (Held(own, {site: true + off}) for off in (0.0, 1e-6, 1e-5))

    found = introduced_ratios(candidate, judge, reference, judge, dtype="float32")

    assert found == {(own.name, site): pytest.approx(ratio, rel=1e-6)}
