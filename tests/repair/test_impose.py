"""What the reference is given of a diagnosis, and what is set aside in its place."""

from types import SimpleNamespace

import pytest

from parity_audit.core.report import Finding
from parity_audit.core.types import Description
from parity_audit.repair.impose import impositions_of, places, set_aside
from parity_audit.specs.resolve import resolve_model

LLAMA = resolve_model("meta-llama/Llama-3.2-1B")
PLAN = SimpleNamespace(spec=LLAMA.spec, config={**LLAMA.config, "num_hidden_layers": 2}, backend_key="hf")
REFERENCE = SimpleNamespace(
    plan=PLAN, description=lambda: Description(backend="hf", package="transformers", version="5.19.0")
)
EVERY = {f"blocks.{layer}.{name}" for layer in (0, 1) for name in ("q", "rot_q", "rot_k", "z", "attn_out", "mlp.post")}
LONG = {"blocks.0.resid_pre", "blocks.0.attn_out", "blocks.0.mlp_out"}


def finding(knob="attention.scale", value=9.5, **how):
    given = {"kind": "constant", "layers": (1,), "site": "blocks.1.attn_scores", "spec_value": 8.0, **how}
    return Finding(knob=knob, reference_value=8.0, candidate_value=value, **given)


def test_a_value_is_imposed_in_the_layers_of_its_finding():
    (way,) = impositions_of([finding()], REFERENCE)

    assert way.why == ""
    assert [edit.path for edit in way.edits] == ["model.layers[1].self_attn.scaling"]
    assert way.edits[0].value == pytest.approx(1 / 9.5)


def test_several_values_of_one_setting_are_each_imposed_in_their_own_layers():
    ways = impositions_of([finding(value=16.0, layers=(0,)), finding(value=32.0, layers=(1,))], REFERENCE)

    assert [(edit.path, edit.value) for way in ways for edit in way.edits] == [
        ("model.layers[0].self_attn.scaling", 1 / 16), ("model.layers[1].self_attn.scaling", 1 / 32),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("read_from", "norms"),
    [
        (["ln2.out"], ["model.layers[*].post_attention_layernorm"]),
        (["ln1.out", "ln_final.out"], ["model.layers[*].input_layernorm", "model.norm"]),
        (["mlp.post"], ["model.layers[*].input_layernorm", "model.layers[*].post_attention_layernorm", "model.norm"]),
    ],
)
def test_a_value_is_imposed_on_the_norms_that_have_it(read_from, norms):
    facts = [{"layer": None if site == "ln_final.out" else 0, "read_from": site} for site in read_from]
    eps = finding("norm.eps", 1e-3, layers=None, site="blocks.0.ln2.out", evidence={"candidate": facts})
    (way,) = impositions_of([eps], REFERENCE)

    assert {edit.path.rpartition(".")[0] for edit in way.edits} == set(norms)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (finding("logits.dtype", "bfloat16 throughout", layers=None, site="logits"), "no setting that says this"),
        (finding("rope.theta", 10000.0, site="blocks.1.rot_q"), "one setting for all layers"),
        (finding(evidence={"extent": "in row 1 of a batch"}), "only in row 1 of a batch"),
        (finding("weights", 1.0, kind="weights", evidence={"tensor": "x"}), "it is in a tensor"),
        (finding("mlp", None, kind="unexplained"), "no cause is known"),
    ],
)
def test_what_no_setting_of_the_reference_says_is_not_imposed_and_why(wrong, why):
    (way,) = impositions_of([wrong], REFERENCE)

    assert way.edits == ()
    assert why in way.why


@pytest.mark.parametrize(
    ("fact", "by_formula"),
    [
        ({"layer": 1, "explained_by": "formula", "read_from": "attn_scores"}, True),
        ({"layer": 1, "read_from": "z"}, False),
    ],
)
def test_what_no_setting_says_is_imposed_in_the_formula_where_a_formula_leaves_rounding(fact, by_formula):
    evidence = {"candidate": [fact], "extent": "in row 1 of a batch"}
    (no_setting,) = impositions_of([finding(evidence=evidence)], REFERENCE)
    (setting,) = impositions_of([finding(evidence={"candidate": [fact]})], REFERENCE)

    assert no_setting.in_formula is by_formula
    assert not setting.in_formula


def test_a_cause_in_decoded_tokens_does_not_change_what_is_imposed_everywhere():
    late = finding(value=12.0, evidence={"extent": "in tokens decoded from the cache"})

    first, second = impositions_of([finding(), late], REFERENCE)

    assert first.edits[0].value == pytest.approx(1 / 9.5)
    assert second.edits == ()


def test_the_reference_goes_on_from_the_candidate_s_tensor_behind_the_error():
    scores = set_aside(["blocks.1.attn_scores"], EVERY)

    assert scores.taken == {"blocks.1.z"}
    assert scores.hidden == {"blocks.1.attn_scores", "blocks.1.pattern", "blocks.1.z"}
    assert set_aside(["blocks.0.rot_q"], EVERY).taken == {"blocks.0.rot_q", "blocks.0.rot_k"}
    assert set_aside(["blocks.0.z"], LONG).taken == {"blocks.0.attn_out"}
    assert set_aside(["blocks.0.mlp.post"], LONG).taken == {"blocks.0.mlp_out"}
    assert "blocks.0.mlp_out" in set_aside(["blocks.0.mlp.post"], LONG).hidden
    assert set_aside(["logits"], LONG) == set_aside(["logits"], {"logits"}).__class__(
        taken=frozenset(), hidden=frozenset({"logits", "returned"})
    )


def test_where_an_error_enters():
    assert places(finding(), PLAN) == {"blocks.1.attn_scores"}
    assert places(finding("norm.eps", layers=None, site="blocks.0.ln1.out"), PLAN) == {
        "blocks.0.ln1.out",
        "blocks.1.ln1.out",
    }
    head = finding(
        "weights", kind="weights", site="model.embed_tokens.weight", evidence={"tensor": "model.embed_tokens.weight"}
    )
    assert places(head, PLAN) == {"embed"}
    named = finding("qkv", None, kind="unexplained", evidence={"sites": ["blocks.1.k"]})
    assert places(named, PLAN) == {"blocks.1.k"}


@pytest.mark.parametrize(("source", "value"), [("ln1.out + attn_out", True), ("resid_pre", None)])
def test_a_bloom_that_adds_to_its_norms_is_what_a_setting_says_and_other_sums_are_not(source, value):
    bloom = resolve_model("bigscience/bloom-560m")
    reference = SimpleNamespace(
        plan=SimpleNamespace(spec=bloom.spec, config=bloom.config, backend_key="hf"), description=REFERENCE.description
    )
    wrong = Finding(
        knob="resid_mid.source", kind="variant", layers=None, site="blocks.0.resid_mid",
        reference_value="as computed", candidate_value=source,
    )  # fmt: skip
    (way,) = impositions_of([wrong], reference)

    assert [edit.value for edit in way.edits] == ([] if value is None else [value])
