"""Which value a patch sets, and which patches say nothing."""

import dataclasses
from types import SimpleNamespace

import pytest

from parity_audit.core.report import Finding, Patch
from parity_audit.core.types import Edit, ReadBack
from parity_audit.repair.choose import propose, target_value, whole_value, whole_values
from parity_audit.repair.verify import changes_nothing
from parity_audit.specs.resolve import resolve_model

GEMMA = resolve_model("gemma-2-2b-it")
PLAN = SimpleNamespace(spec=GEMMA.spec, config={**GEMMA.config, "num_hidden_layers": 4})


def finding(knob, reference, *, spec=None, stderr=None, layers=None, departs="candidate"):
    return Finding(
        knob=knob, kind="constant", layers=layers, site="x", reference_value=reference, candidate_value=1.0,
        spec_value=spec, departs_from_spec=departs, evidence={"reference": [{"stderr": stderr}]},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fitted", "stderr", "value"),
    [
        (15.99997, 1e-4, 16.0),
        (1.04e-6, 2e-8, 1e-6),  # an eps read off large activations: the spec's within its error
        (1.04e-6, 1e-9, 1.04e-6),  # read well, and not the spec's
        (15.0, 1e-4, 15.0),
    ],
)
def test_the_spec_s_number_where_the_reference_agrees_with_it(fitted, stderr, value):
    spec = 16.0 if fitted > 1 else 1e-6
    assert target_value(finding("x", fitted, spec=spec, stderr=stderr)) == value


def test_a_window_of_one_layer_is_no_other_s():
    one = finding("attention.window", None, layers=(1,))

    assert whole_value(None, one, PLAN) == [4096, None, 4096, None]
    assert whole_value(32, one, PLAN) == [4096, 32, 4096, None]
    assert whole_value({"by_layer": {"1": 7, "2": 8}}, one, PLAN) == [4096, 7, 8, None]
    assert whole_value(16.0, finding("attention.scale", 16.0, layers=(1,)), PLAN) == 16.0


def test_windows_that_were_found_in_several_layers_are_one_setting():
    found = [finding("attention.window", None, layers=(layer,)) for layer in (1, 2)]
    scales = [finding("attention.scale", 16.0, layers=(layer,)) for layer in (1, 2)]
    values = whole_values([*found, *scales], lambda item: 10 + item.layers[0], PLAN)

    assert values == {"attention.window": [4096, 11, 12, None], "attention.scale": 12}


@pytest.mark.parametrize(("layers", "right"), [((0, 1, 2, 3, 4), 1e4), ((5,), 1e6), (None, 1e4)])
def test_the_right_base_of_some_layers_is_not_given_to_those_that_have_another(layers, right):
    gemma = resolve_model("google/gemma-3-270m")
    plan = SimpleNamespace(
        spec=gemma.spec, config=gemma.config, backend_key="hf", ref=SimpleNamespace(name="hf", target=None)
    )
    wrong = finding("rope.theta", right, spec=right, layers=layers)
    (proposal,), gaps = propose([wrong], plan, "5.19.0", [wrong])

    values = {edit.path.split(".")[-1]: edit.value for edit in proposal.edits}
    bases = {
        name: value[1] ** -(256 / 2) for name, value in values.items() if name.endswith("inv_freq")
    }  # inv_freq[1] = base^(-2/d_head)
    assert gaps == []
    assert {value for name, value in values.items() if name.endswith("attention_scaling")} == {1.0}
    assert bases["sliding_attention_inv_freq"] == pytest.approx(1e4)
    assert bases["full_attention_inv_freq"] == pytest.approx(1e4 if layers is None else 1e6)


@pytest.mark.parametrize(
    ("wrong", "right", "one"),
    [
        (["mlp_out"], ["attn_out", "resid_mid"], True),
        (["resid_mid"], ["attn_out", "mlp_out", "resid_post"], True),
        (["resid_mid", "resid_post"], ["attn_out", "mlp_out"], False),  # hooks that show what is made before the factor
        (["mlp_out"], [], False),  # nobody sees what attention adds
    ],
)
def test_a_factor_that_one_sublayer_lost_is_no_setting(wrong, right, one):
    facts = [{"layer": 0, "read_from": site} for site in wrong]
    lost = dataclasses.replace(
        finding("residual.scale", 0.22, spec=0.22), evidence={"candidate": facts, "right_at": right}
    )
    granite = resolve_model("ibm-granite/granite-3.0-2b-base")
    plan = SimpleNamespace(
        spec=granite.spec, config=granite.config, backend_key="hf", ref=SimpleNamespace(name="hf", target=None)
    )
    proposals, gaps = propose([lost], plan, "5.19.0", known=[lost])

    assert [(proposal.value, len(gaps)) for proposal in proposals] == ([] if one else [(0.22, 0)])
    assert ["attention and the MLP" in gap.why for gap in gaps] == ([True] if one else [])


def patch(*changed):
    read_back = tuple(ReadBack(path=f"m[{n}]", before=1, after=1, changed=this) for n, this in enumerate(changed))
    return Patch(knob="x", backend="hf", value=1, edits=(), code="", fixes=("x",), read_back=read_back)


def test_a_patch_that_changed_nothing_is_told_from_one_that_could_not_be_read():
    assert changes_nothing(patch(False, False))
    assert not changes_nothing(patch(False, True))
    assert not changes_nothing(patch())
    fresh = Edit(op="load", value={"attn_implementation": "eager"})
    assert not changes_nothing(dataclasses.replace(patch(False), edits=(fresh,)))
