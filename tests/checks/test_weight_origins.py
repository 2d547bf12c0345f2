"""Tensors that hold another tensor's numbers: which, and blocks that are exchanged as one matter."""

import dataclasses

import pytest
import torch

from parity_audit.checks.preflight import weight_findings
from parity_audit.checks.weights import (
    grouped,
    with_origins,
    with_right_tensors,
    without_consequences,
    without_repeated_tensor_findings,
)
from parity_audit.core.report import Finding
from parity_audit.diagnose.structure.sample import NOT_STORED
from parity_audit.formulas.fingerprint import fingerprint

NAMES = ("attn.q_proj.weight", "mlp.up_proj.weight")


def checkpoint(blocks=3):
    made = torch.Generator().manual_seed(1)
    return {f"model.layers.{i}.{name}": torch.randn(6, 4, generator=made) for i in range(blocks) for name in NAMES}


def prints(tensors):
    return [fingerprint(name, value) for name, value in tensors.items()]


def found(ours):
    sides = prints(checkpoint()), prints(ours)
    return with_origins(weight_findings(*sides, "float32")[0], *sides, "float32")


def test_the_checkpoint_itself_is_no_finding():
    assert found(checkpoint()) == []


def test_exchanged_blocks_are_one_finding():
    ours = checkpoint()
    for name in NAMES:
        one, two = f"model.layers.1.{name}", f"model.layers.2.{name}"
        ours[one], ours[two] = ours[two], ours[one]
    (only,) = found(ours)

    assert only.layers == (1, 2)
    assert only.candidate_value == "block 1 holds those of block 2, block 2 holds those of block 1"
    assert len(only.evidence["tensors"]) == 4


def test_a_tensor_that_is_another_says_which():
    ours = checkpoint()
    ours["model.layers.0.mlp.up_proj.weight"] = ours["model.layers.0.attn.q_proj.weight"]
    (only,) = found(ours)
    assert (only.candidate_value, only.layers) == ("model.layers.0.attn.q_proj.weight", (0,))


def test_a_tensor_that_is_no_other_keeps_its_numbers():
    ours = checkpoint()
    ours["model.layers.0.mlp.up_proj.weight"] = 2 * ours["model.layers.0.mlp.up_proj.weight"]
    (only,) = found(ours)
    assert "holds" not in only.evidence
    assert only.candidate_value == 2 * only.reference_value


def finding(knob, kind, component="", layers=(0,)):
    return Finding(
        knob=knob, kind=kind, layers=layers, site="x", reference_value=None, candidate_value=None, confidence=0.9,
        departs_from_spec="candidate", evidence={"component": component}, message="",
    )  # fmt: skip


def test_what_follows_from_a_wrong_tensor_is_not_said_twice():
    tensor_of = {("mlp.up", 0): "model.layers.0.mlp.up_proj.weight", ("mlp.up", 1): "model.layers.1.mlp.up_proj.weight"}
    ours = checkpoint()
    ours["model.layers.0.mlp.up_proj.weight"] = torch.zeros(6, 4)
    weights = found(ours)
    follows, elsewhere = finding("mlp", "unexplained", "mlp"), finding("mlp", "unexplained", "mlp", (1,))
    how, constant = finding("weights.mlp.up", "variant"), finding("mlp.activation", "variant")
    another = finding("weights.mlp.up", "weights")
    zero, rows = finding("mlp.pre_linear.source", "variant", "mlp"), finding("mlp.pre_linear.rows", "variant", "mlp")

    kept = without_consequences([follows, elsewhere, how, constant, another, zero, rows], weights, tensor_of)
    assert kept == [elsewhere, how, constant, another, rows]


def test_a_tensor_that_is_another_one_everywhere_is_not_said_again_by_its_fit():
    """Gate and up that are exchanged in all blocks: the fit has no layers then."""
    tensor_of = {("attn.q", at): f"model.layers.{at}.attn.q_proj.weight" for at in range(3)}
    ours = checkpoint()
    for at in range(3):
        ours[f"model.layers.{at}.attn.q_proj.weight"] = ours[f"model.layers.{at}.mlp.up_proj.weight"]
    fit = finding("weights.attn.q", "weights", layers=None)

    assert without_consequences([fit], found(ours), tensor_of) == []
    assert without_consequences([fit], found(ours)[:2], tensor_of) == [fit]


def test_the_gain_of_a_norm_whose_weight_is_that_of_another_block_is_not_said_again():
    moved = Finding(
        knob="weights", kind="weights", layers=(1,), site="model.layers.1.input_layernorm.weight", reference_value=None,
        candidate_value=None, evidence={"holds": "model.layers.2.input_layernorm.weight"},
    )  # fmt: skip
    tensor_of = {("norm.ln1", at): f"model.layers.{at}.input_layernorm.weight" for at in range(3)}
    gain = dataclasses.replace(finding("ln1.out.gain", "variant", layers=(1,)), evidence={"component": "norm"})

    assert without_consequences([gain], [moved], tensor_of) == []
    other = dataclasses.replace(gain, layers=(0,))
    assert without_consequences([other], [moved], tensor_of) == [other]


@pytest.mark.parametrize(
    ("knob", "kind", "component", "role"),
    [
        ("weights.mlp.gate", "weights", "mlp", "mlp.up"),
        ("attention.o_bias", "variant", "attn_proj", "attn.o.bias"),
        ("mlp.gate_bias", "variant", "mlp", "mlp.up.bias"),
        ("q_norm.out.gain", "variant", "qk_norm", "norm.q"),
        ("qk_norm.weight", "variant", "qk_norm", "norm.k"),
        ("rope", "unexplained", "rope", "norm.k"),
    ],
)
def test_what_exchanged_blocks_show_elsewhere_is_not_said_again(knob, kind, component, role):
    own, other = (f"layers.{at}.{role}" for at in (1, 2))
    moved = Finding(
        knob="weights", kind="weights", layers=(1,), site=own, reference_value=None, candidate_value=None,
        evidence={"holds": other},
    )  # fmt: skip
    shown = finding(knob, kind, component, layers=(1,))

    assert without_consequences([shown], [moved], {(role, 1): own, ("mlp.down", 1): "another"}) == []
    assert without_consequences([shown], [moved], {(role, 1): "another", ("mlp.down", 1): own}) == [shown]


def test_a_fit_of_a_role_that_the_checkpoint_has_no_tensor_of_stays():
    """The input of a plain MLP is read as its gate, and its tensor has the role of `up`."""
    fit = finding("weights.mlp.gate", "weights", layers=None)
    tensor_of = {("mlp.up", at): f"model.layers.{at}.mlp.up_proj.weight" for at in range(3)}

    assert without_consequences([fit], [], tensor_of) == [fit]


def test_the_same_tensor_of_several_blocks_is_one_finding():
    ours = {name: value + 1 if "q_proj" in name else value for name, value in checkpoint().items()}
    (only,) = grouped(found(ours))

    assert only.layers == (0, 1, 2)
    assert only.evidence["tensors"] == [f"model.layers.{i}.attn.q_proj.weight" for i in range(3)]
    assert "3 tensors model.layers.*.attn.q_proj.weight" in only.message


@pytest.mark.parametrize("factor", [1.1, -1.0, 0.5])
def test_a_multiple_of_a_tensor_says_of_which(factor):
    name = "model.layers.1.attn.q_proj.weight"
    (only,) = found(checkpoint() | {name: factor * checkpoint()[name]})

    assert only.message == f"tensor {name} of the candidate is not the reference's: the values are {factor:g} times its"


@pytest.mark.parametrize("size", [64, 768, 4096])
@pytest.mark.parametrize(("added", "says"), [(1.0, "plus 1"), (-1.0, "minus 1"), (0.25, "plus 0.25")])
def test_a_number_that_is_added_to_a_vector_is_said(size, added, says):
    """As where a port of Gemma keeps 1 + w of a norm."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(2))
    (only,) = weight_findings(prints({"norm": weight}), prints({"norm": weight + added}), "float32")[0]

    assert only.message == f"tensor norm of the candidate is not the reference's: the values are its {says}"


@pytest.mark.parametrize(
    ("change", "dtype", "known"),
    [
        (lambda w: w + 0.05, "float32", True), (lambda w: w + 0.005, "float32", False), (lambda w: w + 1, "bfloat16", False),
        (lambda w: w + 1 + 0.1 * torch.arange(len(w)) / len(w), "float32", False), (lambda w: w.roll(1), "float32", False),
    ],
    ids=["a twentieth", "too small", "in a dtype that rounds it away", "and a slope", "moved"],
)  # fmt: skip
def test_a_number_is_said_where_it_is_all_and_two_digits_of_it_are_sure(change, dtype, known):
    weight = torch.randn(768, generator=torch.Generator().manual_seed(2))
    (only,) = weight_findings(prints({"norm": weight}), prints({"norm": change(weight)}), dtype)[0]

    assert ("plus" in only.message) is known


def test_an_embedding_and_an_unembedding_that_are_one_tensor_are_one_finding():
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    theirs, ours = ({"lm_head.weight": value, "model.embed.weight": value} for value in (table, table + 1))
    sides = prints(theirs), prints(ours)
    (only,) = grouped(weight_findings(*sides, "float32")[0])
    assert only.evidence["tensors"] == ["lm_head.weight", "model.embed.weight"]

    apart = prints(theirs), prints(ours | {"lm_head.weight": table + 2})
    assert len(grouped(weight_findings(*apart, "float32")[0])) == 2


@pytest.mark.parametrize(("parts", "left"), [("q", ["weights.attn.q"]), ("qkv", ["weights"])])
def test_parts_of_a_fused_tensor_that_is_another_one_are_one_finding(parts, left):
    name = "model.layers.1.attn.q_proj.weight"
    tensor = found(checkpoint() | {name: checkpoint()[name].flip(0)})
    tensor_of = {(f"attn.{part}", 1): name for part in parts}
    fits = [
        dataclasses.replace(finding(f"weights.attn.{part}", "weights", layers=(1,)), candidate_value=NOT_STORED)
        for part in parts
    ]

    assert [one.knob for one in without_repeated_tensor_findings([*tensor, *fits], tensor_of)] == left


def test_other_tensors_and_other_causes_stay_apart():
    ours = {name: value + 1 for name, value in checkpoint().items()}
    first = "model.layers.0.attn.q_proj.weight"
    ours[first] = checkpoint()[first][:3]

    assert [(item.site, item.layers) for item in grouped(found(ours))] == [
        (first, (0,)), ("model.layers.0.mlp.up_proj.weight", (0, 1, 2)), ("model.layers.1.attn.q_proj.weight", (1, 2)),
    ]  # fmt: skip


def test_experts_in_another_order_say_which_holds_which():
    made = torch.Generator().manual_seed(2)
    theirs = {f"model.layers.0.mlp.experts.{e}.w1.weight": torch.randn(6, 4, generator=made) for e in range(3)}
    ours = dict(zip(theirs, [*list(theirs.values())[1:], next(iter(theirs.values()))], strict=True))
    sides = prints(theirs), prints(ours)
    (only,) = grouped(with_origins(weight_findings(*sides, "float32")[0], *sides, "float32"))
    unexplained = Finding(
        knob="mlp_out", kind="unexplained", layers=(0,), site="blocks.0.mlp_out", reference_value=None,
        candidate_value=None, evidence={"component": "mlp_out"},
    )  # fmt: skip

    assert only.evidence["moved"] == ["0.0 holds 0.1", "0.1 holds 0.2", "0.2 holds 0.0"]
    assert without_consequences([unexplained], [only], {}) == []


@pytest.mark.parametrize(("changed", "is_right"), [((), True), (("attn.q_proj",), False), (("mlp.up_proj",), True)])
@pytest.mark.parametrize("layers", [None, (1,)])
def test_a_projection_that_departs_though_its_tensor_is_right_says_so(changed, is_right, layers):
    """Values mixed with those of another layer: whoever reads that the weights are others looks in the wrong place."""
    ours, names = checkpoint(), {("attn.q", i): f"model.layers.{i}.attn.q_proj.weight" for i in range(3)}
    for name in changed:
        ours[f"model.layers.1.{name}.weight"] = 2 * ours[f"model.layers.1.{name}.weight"]
    departs = Finding(
        knob="weights.attn.q", kind="weights", site="blocks.1.q", layers=layers, candidate_value="not the checkpoint's",
        reference_value="the checkpoint's", spec_value="the checkpoint's", confidence=0.5, message="as it was",
        departs_from_spec="candidate",
    )  # fmt: skip
    *_, said = with_right_tensors([*found(ours), departs], prints(ours), names)

    assert ("though the tensor is the checkpoint's" in said.message) == is_right
    assert with_right_tensors([departs], [], names) == [departs]
