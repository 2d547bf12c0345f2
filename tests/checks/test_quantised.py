"""A quantised model is one finding, and another format or other layers are another."""

from parity_audit.checks.quantised import quantised_as_one
from parity_audit.checks.weights import without_repeated_tensor_findings
from parity_audit.core.report import Finding

TENSORS = {(role, at): f"model.layers.{at}.{role}" for role in ("attn.q", "attn.k", "mlp.up") for at in (0, 1)}
INT8 = "the checkpoint's rounded to int8 by row"


def fit(role, value=INT8, layers=None):
    return finding(f"weights.{role}", value, layers, f"blocks.0.{role}")


def as_one(findings):
    return quantised_as_one(without_repeated_tensor_findings(findings, TENSORS))


def finding(knob, value, layers, site, **evidence):
    return Finding(
        knob=knob, kind="weights", layers=layers, site=site, reference_value="the checkpoint's", candidate_value=value,
        confidence=0.9, departs_from_spec="candidate", evidence=evidence, message="",
    )  # fmt: skip


def differs(*roles, **evidence):
    names = [name for (role, _), name in TENSORS.items() if role in roles]
    return finding("weights", 0.1, (0, 1), names[0], tensor=names[0], tensors=names, **evidence)


def test_projections_that_are_rounded_alike_are_one_matter_and_their_tensors_none_of_their_own():
    own = differs("mlp.up")
    found = as_one([differs("attn.q", "attn.k"), own, fit("attn.q"), fit("attn.k")])

    assert [(one.knob, one.candidate_value) for one in found] == [
        ("weights.format", "rounded to int8 by row"),
        ("weights", 0.1),
    ]
    assert found[0].evidence["projections"] == ["attn.q", "attn.k"]
    assert found[1] is own


def test_one_rounded_projection_other_formats_and_other_layers_stay_as_they_are():
    alone = [fit("attn.q")]
    formats = [fit("attn.q"), fit("attn.k", "the checkpoint's rounded to bfloat16")]
    layers = [fit("attn.q", layers=(0,)), fit("attn.k", layers=(1,))]
    shifted = [fit("attn.q", "the checkpoint's plus 1"), fit("attn.k", "the checkpoint's plus 1")]

    for findings in (alone, formats, layers, shifted):
        assert quantised_as_one(findings) == findings


def test_a_tensor_that_is_rounded_in_some_layers_only_is_not_explained_in_the_others():
    whole = differs("attn.q", "attn.k")
    found = as_one([whole, fit("attn.q", layers=(0,)), fit("attn.k", layers=(0,))])

    assert [one.knob for one in found] == ["weights.format", "weights"]


def test_a_tensor_that_is_known_to_be_another_stays():
    moved = differs("attn.q", holds="model.layers.1.attn.k")
    assert moved in as_one([moved, fit("attn.q"), fit("attn.k")])


def test_a_fit_names_the_tensors_that_it_speaks_of_and_they_are_none_of_their_own():
    scale, other = fit("attn.q.scale", 1.05), differs("mlp.up")
    found = without_repeated_tensor_findings([differs("attn.q"), other, scale], TENSORS)

    assert [one.knob for one in found] == ["weights", "weights.attn.q.scale"]
    assert found[0] is other
    assert found[1].evidence["tensors"] == ["model.layers.0.attn.q", "model.layers.1.attn.q"]
    elsewhere = fit("attn.q.scale", 1.05, layers=(0,))
    assert without_repeated_tensor_findings([differs("attn.q"), elsewhere], TENSORS) == [differs("attn.q"), elsewhere]


def test_a_fit_that_says_that_the_tensor_is_the_checkpoints_explains_no_other_tensor():
    """Norms folded into a projection: what it makes is the checkpoint's of normalised inputs, and one row of it may be wrong."""
    folded = fit("attn.q", "the checkpoint's, of inputs with rms norm ln1")

    assert without_repeated_tensor_findings([differs("attn.q"), folded], TENSORS) == [differs("attn.q"), folded]


def test_what_a_tensor_of_its_own_holds_is_told_once():
    tensors = {("attn.sinks", at): f"sinks.{at}" for at in (0, 1)}
    lost = finding("weights", 0.0, (0, 1), "sinks.0", tensor="sinks.0", tensors=["sinks.0", "sinks.1"])

    (one,) = without_repeated_tensor_findings([lost, finding("attention.sinks", None, None, "blocks.0.z")], tensors)
    assert (one.knob, one.evidence["tensors"]) == ("attention.sinks", ["sinks.0", "sinks.1"])


def test_the_gain_of_a_norm_speaks_of_the_weight_of_that_norm_alone():
    tensors = {(role, at): f"{at}.{role}" for role in ("norm.ln1", "norm.ln1.bias", "norm.ln2") for at in (0, 1)}
    tensors["norm.final", None] = "norm"
    weight = [finding("weights", 0.1, (at,), tensors[role, at], tensor=tensors[role, at])
              for role in ("norm.ln1", "norm.ln2") for at in (0, 1)]  # fmt: skip
    final = finding("weights", 0.1, None, "norm", tensor="norm")
    gain = finding(
        "ln1.out.gain", "0.9 to 1.1", (0, 1), "blocks.0.ln1.out", sites=["blocks.0.ln1.out", "blocks.1.ln1.out"]
    )
    last = finding("ln_final.out.gain", "0.9 to 1.1", None, "ln_final.out")
    found = without_repeated_tensor_findings([*weight, final, gain, last], tensors)
    read = [{"layer": at, "read_from": site} for at in (0, 1) for site in ("ln1.out", "ln2.out")]
    offset = finding(
        "norm.offset", 1.0, None, "blocks.0.ln1.out", candidate=[*read, {"layer": None, "read_from": "ln_final.out"}]
    )

    assert [one.knob for one in without_repeated_tensor_findings([*weight, final, offset], tensors)] == ["norm.offset"]
    assert [one.site for one in found] == [*(one.site for one in weight[2:]), gain.site, last.site]
    assert [one.evidence["tensors"] for one in found[2:]] == [["0.norm.ln1", "1.norm.ln1"], ["norm"]]
