"""A quantised model is one finding, and another format or other layers are another."""

from parity_audit.checks.quantised import quantised_as_one
from parity_audit.core.report import Finding

TENSORS = {(role, at): f"model.layers.{at}.{role}" for role in ("attn.q", "attn.k", "mlp.up") for at in (0, 1)}
INT8 = "the checkpoint's rounded to int8 by row"


def fit(role, value=INT8, layers=None):
    return finding(f"weights.{role}", value, layers, f"blocks.0.{role}")


def finding(knob, value, layers, site, **evidence):
    return Finding(
        knob=knob, kind="weights", layers=layers, site=site, reference_value="the checkpoint's", candidate_value=value,
        confidence=0.9, departs_from_spec="candidate", evidence=evidence, message="",
    )  # fmt: skip


def differs(*roles, **evidence):
    names = [name for (role, _), name in TENSORS.items() if role in roles]
    return finding("weights", 0.1, (0, 1), names[0], tensors=names, **evidence)


def test_projections_that_are_rounded_alike_are_one_matter_and_their_tensors_none_of_their_own():
    own = differs("mlp.up")
    found = quantised_as_one([differs("attn.q", "attn.k"), own, fit("attn.q"), fit("attn.k")], TENSORS)

    assert [(one.knob, one.candidate_value) for one in found] == [
        ("weights.format", "rounded to int8 by row"),
        ("weights", 0.1),
    ]
    assert found[0].evidence["projections"] == ["attn.q", "attn.k"]
    assert found[1] is own


def test_one_rounded_projection_other_formats_and_other_layers_stay_as_they_are():
    alone = [differs("attn.q"), fit("attn.q")]
    formats = [fit("attn.q"), fit("attn.k", "the checkpoint's rounded to bfloat16")]
    layers = [fit("attn.q", layers=(0,)), fit("attn.k", layers=(1,))]
    shifted = [fit("attn.q", "the checkpoint's plus 1"), fit("attn.k", "the checkpoint's plus 1")]

    for findings in (alone, formats, layers, shifted):
        assert quantised_as_one(findings, TENSORS) == findings


def test_a_tensor_that_is_rounded_in_some_layers_only_is_not_explained_in_the_others():
    whole = differs("attn.q", "attn.k")
    found = quantised_as_one([whole, fit("attn.q", layers=(0,)), fit("attn.k", layers=(0,))], TENSORS)

    assert [one.knob for one in found] == ["weights.format", "weights"]


def test_a_tensor_that_is_known_to_be_another_stays():
    moved = differs("attn.q", holds="model.layers.1.attn.k")
    assert moved in quantised_as_one([moved, fit("attn.q"), fit("attn.k")], TENSORS)
